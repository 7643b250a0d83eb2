"""One random Mamba2 verify: inputs, pools with NaN wherever nothing may be read, and bookkeeping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.mamba2.arguments import per_head
from mamba_mtp_kernels.mamba2.reference import mamba2_verify_reference
from mamba_mtp_kernels.mamba2.window import Mamba2Window

from ..helpers import (
    Bookkeeping,
    assert_same_bits,
    chain_parents,
    gap_between_slots,
    plan_alone,
    planned,
    random_bookkeeping,
    random_tree_parents,
)

WINDOWS = ("window_x", "window_B", "window_dt")


@dataclass
class Case:
    """Arguments of one mamba2_verify. `tensors` holds every tensor but the bookkeeping, by argument name."""

    books: Bookkeeping
    tensors: dict[str, torch.Tensor | None]
    dt_softplus: bool = True

    def window(self) -> Mamba2Window:
        return self.books.window(Mamba2Window, **{name.removeprefix("window_"): self.tensors[name] for name in WINDOWS})

    def fold(self, fold: Callable[..., None], folds: Folds, axis_order: torch.Tensor | None = None) -> None:
        """Run a fold over the one layer."""
        given = self.tensors
        fold(States(given["checkpoint"][None], axis_order), self.window().of_all_layers(), folds, A=given["A"][None])

    def run(self, verify: Callable[..., torch.Tensor], **extra: object) -> torch.Tensor:
        """`verify`, after the nodes' x and B have been put where a convolution puts them."""
        self.put_nodes()
        return self.verify(verify, **extra)

    def put_nodes(self) -> None:
        self.books.put_nodes(*((self.tensors[f"window_{name}"], self.tensors[name]) for name in ("x", "B")))

    def verify(
        self,
        verify: Callable[..., torch.Tensor],
        *,
        axis_order: torch.Tensor | None = None,
        schedule: torch.Tensor | None = None,
        **extra: object,
    ) -> torch.Tensor:
        """Whatever the plan says is asked of the plan alone."""
        given, window = self.tensors, self.window()
        rows = planned(replace(self.books.batch_rows, schedule=schedule), window, self.books.nodes)
        return verify(
            *(given[name] for name in ("dt", "C")),
            **{name: given[name] for name in ("A", "D", "dt_bias")},
            dt_softplus=self.dt_softplus,
            states=States(given["checkpoint"], axis_order),
            rows=plan_alone(rows),
            window=replace(window, pending=torch.full_like(window.pending, 10**6)),
            **extra,
        )

    def clone(self) -> Case:
        return replace(
            self,
            books=self.books.clone(),
            tensors={name: None if x is None else _clone(x) for name, x in self.tensors.items()},
        )

    def to(self, device: torch.device) -> Case:
        if device.type == "cpu":
            return self
        moved = {}
        for name, x in self.tensors.items():
            if x is not None:
                moved[name] = _storage_on(x, device).as_strided(x.shape, x.stride(), x.storage_offset())
            else:
                moved[name] = None
        return replace(self, books=self.books.to(device), tensors=moved)

    def oracle(self) -> tuple[torch.Tensor, Case]:
        """(y, the case after it) of the float64 recurrence; a 16-bit checkpoint keeps its own rounding."""
        copy = self.clone()
        for name, x in copy.tensors.items():
            if x is None or (name == "checkpoint" and x.dtype != torch.float32):
                continue
            if name in ("A", "D", "dt_bias", "dt"):  # double() would write expanded views out
                x = per_head(name, x, 2 if name == "dt" else 1)
            copy.tensors[name] = x.double()
        return copy.run(mamba2_verify_reference, compute_dtype=torch.float64), copy

    def check_untouched(self, before: Case) -> None:
        """Nothing changed but appended window entries and the checkpoints of folding slots."""
        books = before.books
        self.books.assert_same(books)
        for name in ("x", "dt", "B", "C", "A", "D", "dt_bias"):
            if self.tensors[name] is not None:
                assert_same_bits(name, self.tensors[name], before.tensors[name])
        appended = torch.zeros(books.order.shape, dtype=torch.bool)
        folding = torch.zeros(books.pending.shape[0], dtype=torch.bool)
        for b in range(books.batch):
            if books.slots[b] > 0:
                p, row = books.pending_of(b), int(books.rows[b])
                appended[row, books.order[row, p : p + books.nodes].long().cpu()] = True
                folding[int(books.slots[b])] = books.folding(b) > 0
        for name in WINDOWS:
            assert_same_bits(name, self.tensors[name].cpu()[~appended], before.tensors[name].cpu()[~appended])
        after, old = self.tensors["checkpoint"].cpu(), before.tensors["checkpoint"].cpu()
        assert_same_bits("checkpoint", after[~folding], old[~folding])

    def appended(self) -> dict[str, torch.Tensor]:
        """The window entries [live rows, N, ...] that this verify wrote."""
        books = self.books
        rows, positions = [], []
        for b in range(books.batch):
            if books.slots[b] > 0:
                p, row = books.pending_of(b), int(books.rows[b])
                rows.append(row)
                positions.append(books.order[row, p : p + books.nodes].tolist())
        at = (torch.tensor(rows)[:, None], torch.tensor(positions))
        return {name: self.tensors[name].cpu()[at] for name in WINDOWS}


def _storage_on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of all that x's storage holds, so that strides, gaps and expanded dimensions survive."""
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (storage.nbytes() // x.element_size(),))
    return flat.to(device, copy=True)


def _clone(x: torch.Tensor) -> torch.Tensor:
    return _storage_on(x, x.device).as_strided(x.shape, x.stride(), x.storage_offset())


def make_case(
    *,
    batch: int = 3,
    nodes: int = 4,
    tree: bool = False,
    nheads: int = 4,
    headdim: int = 12,
    ngroups: int = 2,
    dstate: int = 16,
    fold_threshold: int = 6,
    pending: list[int] | None = None,
    newest: list[int] | None = None,
    padding: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    expanded: bool = False,
    strided: bool = False,
    decay: float = 1.0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Unit-scale inputs. Free window entries, slots outside the batch and the gaps of strided pools hold NaN.

    `decay` scales A; `expanded` hands A, D, dt_bias and dt as SGLang's stride-0 views.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    parents = random_tree_parents(batch, nodes, generator) if tree else chain_parents(batch, nodes)
    if pending is None:
        pending = torch.randint(0, fold_threshold + nodes + 1, (batch,), generator=generator).tolist()
    books = random_bookkeeping(
        parents=parents,
        pending=pending,
        fold_threshold=fold_threshold,
        generator=generator,
        padding=padding,
        index_dtype=index_dtype,
        newest=newest,
    )
    tokens, (rows, capacity), slots = batch * nodes, books.order.shape, books.pending.shape[0]
    inner, width = nheads * headdim, ngroups * dstate
    # x | B | C side by side, as the conv kernel leaves them
    x, B, C = randn(tokens, inner + 2 * width).to(dtype).split([inner, width, width], dim=1)
    tensors: dict[str, torch.Tensor | None] = {
        "x": x.unflatten(1, (nheads, headdim)),
        "B": B.unflatten(1, (ngroups, dstate)),
        "C": C.unflatten(1, (ngroups, dstate)),
        "dt": randn(tokens, nheads + 3).to(dtype)[:, :nheads],
        "A": -decay * (0.1 + torch.rand(nheads, generator=generator)),
        "D": randn(nheads),
        "dt_bias": randn(nheads),
        "window_x": randn(rows, capacity, nheads, headdim).to(dtype),
        "window_B": randn(rows, capacity, ngroups, dstate).to(dtype),
        "window_dt": torch.nn.functional.softplus(randn(rows, capacity, nheads)),
    }
    if expanded:
        tensors["dt"] = tensors["dt"][:, :, None].expand(-1, -1, headdim)
        tensors["A"] = tensors["A"][:, None, None].expand(-1, headdim, dstate)
        for name in ("D", "dt_bias"):
            tensors[name] = tensors[name][:, None].expand(-1, headdim)
    free = books.free_entries()
    for name in WINDOWS:
        tensors[name][free] = math.nan
    checkpoint = randn(slots, nheads, headdim, dstate)
    unused = torch.ones(slots, dtype=torch.bool)
    unused[books.slots[books.slots > 0].long()] = False
    checkpoint[unused] = math.nan
    tensors["checkpoint"] = checkpoint.to(state_dtype)
    if strided:
        for name in ("checkpoint", *WINDOWS):
            tensors[name] = gap_between_slots(tensors[name], 48)
    return Case(books, tensors).to(torch.device(device))
