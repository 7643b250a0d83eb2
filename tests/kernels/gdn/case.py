"""One random GDN verify: inputs, pools with poison wherever nothing may be read, and bookkeeping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.gdn.reference import gdn_verify_reference, token_factors
from mamba_mtp_kernels.gdn.window import GdnWindow

from ..helpers import Bookkeeping, chain_parents, gap_between_slots, random_bookkeeping, random_tree_parents

WINDOWS = ("window_k", "window_v", "window_g", "window_beta", "window_factors")


@dataclass
class Case:
    """Arguments of one gdn_verify. `tensors` holds all but the bookkeeping by name: states are called checkpoint, the
    window's inputs window_*."""

    books: Bookkeeping
    tensors: dict[str, torch.Tensor]
    scale: float

    def run(self, verify: Callable[..., torch.Tensor], **extra: object) -> torch.Tensor:
        """`verify`, after the nodes' keys and values have been put where a convolution puts them."""
        self.put_nodes()
        return self.verify(verify, **extra)

    def put_nodes(self) -> None:
        self.books.put_nodes(*((self.tensors[f"window_{name}"], self.tensors[name]) for name in ("k", "v")))

    def verify(
        self,
        verify: Callable[..., torch.Tensor],
        axis_order: torch.Tensor | None = None,
        schedule: torch.Tensor | None = None,
        **extra: object,
    ) -> torch.Tensor:
        x = self.tensors
        return verify(
            *(x[name] for name in ("q", "a", "b")),
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            scale=self.scale,
            states=States(x["checkpoint"], axis_order),
            rows=replace(self.books.batch_rows, schedule=schedule),
            window=self.window(),
            **extra,
        )

    def window(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> GdnWindow:
        """The window of one layer, its inputs as `change` makes them."""
        inputs = {name.removeprefix("window_"): change(self.tensors[name]) for name in WINDOWS}
        return self.books.window(GdnWindow, **inputs)

    def fold(self, fold: Callable[..., None], folds: Folds, axis_order: torch.Tensor | None = None) -> None:
        """Run a fold over the one layer."""
        fold(States(self.tensors["checkpoint"][None], axis_order), self.window(lambda x: x[None]), folds)

    def clone(self) -> Case:
        # clone() keeps the strides of a dense tensor only: strided pools are rebuilt by as_strided
        return Case(self.books.clone(), {name: clone_tensor(x) for name, x in self.tensors.items()}, self.scale)

    def oracle(self) -> tuple[torch.Tensor, Case]:
        """(o, the case after it) of the float64 recurrence on float64 copies; the state keeps its own rounding."""
        copy = self.clone()
        for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", *WINDOWS):
            copy.tensors[name] = copy.tensors[name].double()
        if copy.tensors["checkpoint"].dtype == torch.float32:
            copy.tensors["checkpoint"] = copy.tensors["checkpoint"].double()
        return copy.run(gdn_verify_reference, compute_dtype=torch.float64), copy

    def live(self) -> torch.Tensor:
        """Batch rows that are no padding."""
        return (self.books.slots > 0).nonzero()[:, 0].cpu()

    def live_tokens(self) -> torch.Tensor:
        nodes = self.books.nodes
        return (self.live()[:, None] * nodes + torch.arange(nodes)).reshape(-1)

    def folding_slots(self) -> torch.Tensor:
        books = self.books
        return torch.tensor([int(books.slots[b]) for b in self.live().tolist() if books.folding(b) > 0]).long()

    def node_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, positions) [live, N] of the entries this verify appends."""
        books = self.books
        rows, positions = [], []
        for b in self.live().tolist():
            p = books.pending_of(b)
            rows.append([int(books.rows[b])] * books.nodes)
            positions.append(books.order[int(books.rows[b]), p : p + books.nodes].tolist())
        return torch.tensor(rows, dtype=torch.long), torch.tensor(positions, dtype=torch.long)


def clone_tensor(x: torch.Tensor) -> torch.Tensor:
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (storage.nbytes() // x.element_size(),))
    return flat.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def make_case(
    *,
    batch: int = 3,
    nodes: int = 4,
    tree: bool = False,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 16,
    fold_threshold: int = 6,
    pending: list[int] | None = None,
    newest: list[int] | None = None,
    padding: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    gate_shift: float = 0.0,
    same_keys: bool = False,
    beta_logit: float | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Unit-scale inputs. Free window entries, slots outside the batch and the gaps of strided pools hold NaN.

    gate_shift moves the raw decay input a (large: strong decay). same_keys gives all tokens of a head one key.
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
    # q | k | v side by side, as the conv kernel leaves them: token stride over all three
    packed = randn(tokens, 2 * H * K + HV * V).to(dtype)
    gate_inputs = torch.cat([randn(tokens, HV) + gate_shift, randn(tokens, HV)], 1).to(dtype)
    window_k, window_v = randn(rows, capacity, H, K).to(dtype), randn(rows, capacity, HV, V).to(dtype)
    if same_keys:
        key = randn(H, K).to(dtype)
        packed[:, H * K : 2 * H * K] = key.reshape(-1)
        window_k[:] = key
    if beta_logit is not None:
        gate_inputs[:, HV:] = beta_logit
    A_log, dt_bias = randn(HV) * 0.5, randn(HV) * 0.5
    raw_a = randn(rows, capacity, HV) + gate_shift
    window_g = -A_log.exp() * torch.nn.functional.softplus(raw_a + dt_bias)
    beta = randn(rows, capacity, HV) if beta_logit is None else torch.full((rows, capacity, HV), beta_logit)
    window_beta = beta.sigmoid()
    free = books.free_entries()
    window_factors = token_factors(window_k.float(), window_g, window_beta)
    for window in (window_k, window_v, window_g, window_beta, window_factors):
        window[free] = math.nan
    checkpoint = randn(slots, HV, V, K)
    unused = torch.ones(slots, dtype=torch.bool)
    unused[books.slots[books.slots > 0].long()] = False
    checkpoint[unused] = math.nan
    checkpoint = checkpoint.to(state_dtype).to(device)

    def on_device(x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        return gap_between_slots(x, 24) if strided else x

    packed, gate_inputs = packed.to(device), gate_inputs.to(device)
    tensors = {
        "q": packed[:, : H * K].view(tokens, H, K),
        "k": packed[:, H * K : 2 * H * K].view(tokens, H, K),
        "v": packed[:, 2 * H * K :].view(tokens, HV, V),
        "a": gate_inputs[:, :HV],
        "b": gate_inputs[:, HV:],
        "A_log": A_log.to(device),
        "dt_bias": dt_bias.to(device),
        "checkpoint": gap_between_slots(checkpoint, 40) if strided else checkpoint,
        "window_k": on_device(window_k),
        "window_v": on_device(window_v),
        "window_g": on_device(window_g),
        "window_beta": on_device(window_beta),
        "window_factors": on_device(window_factors),
    }
    return Case(books.to(device), tensors, scale=K**-0.5)


def with_books(case: Case, **changes: object) -> Case:
    """A copy of the case whose bookkeeping differs in these fields."""
    copy = case.clone()
    return Case(replace(copy.books, **changes), copy.tensors, copy.scale)
