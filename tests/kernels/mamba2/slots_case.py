"""One random Mamba2 verify in slots mode, and SGLang's own kernel on the same inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from mamba_mtp_kernels.common.operands import NodeSlots, States
from mamba_mtp_kernels.mamba2.arguments import SlotsTiling, per_head
from mamba_mtp_kernels.mamba2.reference import mamba2_verify_slots_reference

from ..helpers import chain_parents, gap_between_slots, random_tree_parents


def _copy(x: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """A copy of all that x's storage holds, so that strides, gaps and expanded dimensions survive."""
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (storage.nbytes() // x.element_size(),))
    flat = flat.to(device or x.device, copy=True)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def turn(pool: torch.Tensor, slots: list[int], *, back: bool = False) -> None:
    """Lay the states of these slots of pool [..., S, nheads, headdim, dstate] as KV, in place, or back as VK."""
    *_, nheads, headdim, dstate = pool.shape
    for slot in slots:
        state = pool[..., slot, :, :, :].clone()
        lying = state.unflatten(-3, (nheads,)) if not back else state.flatten(-2).unflatten(-1, (dstate, headdim))
        pool[..., slot, :, :, :] = lying.transpose(-1, -2).reshape(state.shape)


@dataclass
class SlotsCase:
    """Arguments of one mamba2_verify_slots, by name; `parents` of a chain are kept for the oracle, not passed."""

    tensors: dict[str, torch.Tensor | None]
    parents: torch.Tensor
    tree: bool
    dt_softplus: bool = True

    @property
    def nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def live(self) -> torch.Tensor:
        """bool [B*N]: tokens of rows that are no padding."""
        return (self.tensors["read_slots"] > 0).repeat_interleave(self.nodes)

    def run(self, verify: Callable[..., torch.Tensor], **extra: Any) -> torch.Tensor:
        given = self.tensors
        return verify(
            *(given[name] for name in ("x", "dt", "B", "C")),
            **{name: given[name] for name in ("A", "D", "dt_bias")},
            dt_softplus=self.dt_softplus,
            states=States(given["states"], given["axis_order"]),
            nodes=NodeSlots(given["read_slots"], given["write_slots"], self.parents if self.tree else None),
            **extra,
        )

    def to(self, device: torch.device | str | None) -> SlotsCase:
        tensors = {name: None if x is None else _copy(x, device) for name, x in self.tensors.items()}
        return replace(self, tensors=tensors, parents=_copy(self.parents, device))

    def clone(self) -> SlotsCase:
        return self.to(None)

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, pool) of the float64 recurrence."""
        exact = self.clone()
        for name, x in exact.tensors.items():
            if x is not None and x.is_floating_point():
                dims = {"A": 1, "D": 1, "dt_bias": 1, "dt": 2}.get(name)
                exact.tensors[name] = (x if dims is None else per_head(name, x, dims)).double()
        y = exact.run(mamba2_verify_slots_reference, compute_dtype=torch.float64)
        return y, exact.tensors["states"]

    def as_vk(self) -> torch.Tensor:
        """The pool, with every slot as VK."""
        pool, order = self.tensors["states"].clone(), self.tensors["axis_order"]
        if order is not None:
            turn(pool, order.nonzero()[:, 0].tolist(), back=True)
        return pool

    def written(self) -> list[tuple[int, int]]:
        """(token, slot) of every state that is to be written."""
        slots, live = self.tensors["write_slots"].tolist(), self.live.tolist()
        pairs = [(b * self.nodes + i, slot) for b, row in enumerate(slots) for i, slot in enumerate(row)]
        return [(token, slot) for token, slot in pairs if slot > 0 and live[token]]


def make_slots_case(
    *,
    batch: int = 3,
    nodes: int = 4,
    tree: bool = False,
    nheads: int = 4,
    headdim: int = 12,
    ngroups: int = 2,
    dstate: int = 16,
    padding: tuple[int, ...] = (),
    in_place: bool = False,
    unwritten: bool = False,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    expanded: bool = False,
    strided: bool = False,
    kv: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SlotsCase:
    """Unit-scale inputs. Every slot but the ones read holds NaN, as do the gaps of a strided pool.

    in_place: every row reads the slot that one of its own nodes writes (slots mode: its root). unwritten: a childless
    node of each row has no slot. kv: batch rows whose read slot lies as KV (None: no axis_order; other slots lie as
    they may). expanded: A, D, dt_bias and dt as SGLang's stride-0 views.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    parents = random_tree_parents(batch, nodes, generator) if tree else chain_parents(batch, nodes)
    slot_count = 1 + batch * (nodes + 1) + 3
    shuffled = 1 + torch.randperm(slot_count - 1, generator=generator)
    read, write = shuffled[:batch].clone(), shuffled[batch : batch * (nodes + 1)].view(batch, nodes).clone()
    if in_place:
        read = write[torch.arange(batch), torch.randint(0, nodes, (batch,), generator=generator)]
    if unwritten:
        write[::2, -1], write[1::2, -1] = 0, -1
    tokens, inner, width = batch * nodes, nheads * headdim, ngroups * dstate
    # x | B | C side by side, as the conv kernel leaves them
    x, B, C = randn(tokens, inner + 2 * width).to(dtype).split([inner, width, width], dim=1)
    pool = torch.full((slot_count, nheads, headdim, dstate), math.nan)
    pool[read] = randn(batch, nheads, headdim, dstate)
    tensors: dict[str, torch.Tensor | None] = {
        "x": x.unflatten(1, (nheads, headdim)),
        "B": B.unflatten(1, (ngroups, dstate)),
        "C": C.unflatten(1, (ngroups, dstate)),
        "dt": randn(tokens, nheads + 3).to(dtype)[:, :nheads],
        "A": -0.1 - torch.rand(nheads, generator=generator),
        "D": randn(nheads),
        "dt_bias": randn(nheads),
        "states": pool.to(state_dtype),
        "axis_order": None,
    }
    if kv is not None:
        order = torch.randint(0, 2, (slot_count,), generator=generator, dtype=torch.uint8)
        order[read] = 0
        order[read[list(kv)]] = 1
        turn(tensors["states"], read[list(kv)].tolist())
        tensors["axis_order"] = order
    if expanded:
        tensors["dt"] = tensors["dt"][:, :, None].expand(-1, -1, headdim)
        tensors["A"] = tensors["A"][:, None, None].expand(-1, headdim, dstate)
        for name in ("D", "dt_bias"):
            tensors[name] = tensors[name][:, None].expand(-1, headdim)
    for turns, b in enumerate(padding):
        read[b] = -(turns % 2)
        write[b] = torch.randint(-1, slot_count, (nodes,), generator=generator)  # stale
        tensors["x"][b * nodes : (b + 1) * nodes] = math.nan
    tensors["read_slots"] = read.to(index_dtype)
    tensors["write_slots"] = write.to(index_dtype)
    if strided:
        tensors["states"] = gap_between_slots(tensors["states"], 48)
        tensors["write_slots"] = torch.cat([write, write], 1).to(index_dtype)[:, :nodes]
        parents = torch.cat([parents, torch.full((1, nodes), 99)])  # buffers have more rows than the batch
    case = SlotsCase(tensors, parents, tree)
    return case.to(torch.device(device))


class Stock:
    """SGLang's selective_state_update, as its Mamba2 mixer calls it in target verify."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        reason = "SGLang's Mamba2 kernel cannot be imported"
        self.module = pytest.importorskip("sglang.kernels.ops.mamba.triton_ops.mamba_ssm", reason=reason)
        if device.type == "cpu":  # the launcher asks for a device guard that torch has not got for the CPU
            monkeypatch.setattr(torch.cpu, "device", lambda index: contextlib.nullcontext(), raising=False)
        self._monkeypatch = monkeypatch

    def tiling(self, dstate: int) -> SlotsTiling:
        """The launch shape it takes for this dstate."""
        seen: list[SlotsTiling] = []

        class Recorder:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def launch(*arguments: Any, **options: Any) -> None:
                    # DT_SOFTPLUS, TIE_HDIM and BLOCK_SIZE_M end the positional arguments
                    seen.append(SlotsTiling(arguments[-1], options["num_warps"]))

                return launch

        case = make_slots_case(batch=1, nodes=1, dstate=dstate, expanded=True)
        with self._monkeypatch.context() as patch:
            patch.setattr(torch.cpu, "device", lambda index: contextlib.nullcontext(), raising=False)
            patch.setattr(self.module, "_selective_scan_update_kernel", Recorder())
            self.verify(case)
        return seen[0]

    def verify(self, case: SlotsCase) -> tuple[torch.Tensor, torch.Tensor]:
        """(y [B*N, nheads, headdim], states [B, N, ...]) for a case with `expanded` arguments, all slots VK."""
        given, nodes = case.tensors, case.nodes
        batch = given["read_slots"].shape[0]

        def rows(name: str) -> torch.Tensor | None:
            return None if given[name] is None else given[name].unflatten(0, (batch, nodes))

        out = torch.full(given["x"].shape, math.nan, dtype=given["x"].dtype, device=given["x"].device)
        pool = given["states"]
        buffer = torch.full((batch, nodes, *pool.shape[1:]), math.nan, dtype=pool.dtype, device=pool.device)
        before = pool.clone()
        self.module.selective_state_update(
            pool,
            rows("x"),
            rows("dt"),
            given["A"],
            rows("B"),
            rows("C"),
            given["D"],
            z=None,
            dt_bias=given["dt_bias"],
            dt_softplus=case.dt_softplus,
            state_batch_indices=torch.where(given["read_slots"] > 0, given["read_slots"], -1),
            out=out.unflatten(0, (batch, nodes)),
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            cache_steps=nodes,
            retrieve_parent_token=case.parents[:batch] if case.tree else None,
            intermediate_state_indices=torch.arange(batch, dtype=torch.int32, device=pool.device),
        )
        assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
        return out, buffer
