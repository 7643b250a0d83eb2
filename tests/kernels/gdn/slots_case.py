"""One random GDN verify in slots mode: inputs, a pool poisoned wherever nothing may be read, and what must come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from mamba_mtp_kernels.common.axis_order import KV
from mamba_mtp_kernels.common.operands import NodeSlots, States

from ..helpers import assert_close, assert_same_bits, chain_parents, gap_between_slots, random_tree_parents
from .case import clone_tensor
from .checks import FLOAT32_LIMIT, limit_for, positions_in_storage, storage_of

INPUTS = ("q", "k", "v", "a", "b")


@dataclass
class SlotsCase:
    """Arguments of one gdn_verify_slots, by name."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float
    states: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    parents: torch.Tensor | None
    axis_order: torch.Tensor | None = None

    @property
    def nodes(self) -> int:
        return self.write_slots.shape[1]

    def run(self, op: Callable[..., torch.Tensor], **extra: object) -> torch.Tensor:
        return op(
            *(getattr(self, name) for name in INPUTS),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            scale=self.scale,
            states=States(self.states, self.axis_order),
            nodes=NodeSlots(self.read_slots, self.write_slots, self.parents),
            **extra,
        )

    def clone(self) -> SlotsCase:
        tensors = {
            f.name: clone_tensor(x) for f in fields(self) if isinstance(x := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **tensors)

    def live(self) -> torch.Tensor:
        """Batch rows that are no padding."""
        return (self.read_slots > 0).nonzero()[:, 0].cpu()

    def written(self) -> torch.Tensor:
        """Slots of the nodes of live rows [live, N], on the CPU."""
        return self.write_slots.cpu().long()[self.live()]

    def states_written(self) -> torch.Tensor:
        """[live, N, HV, V, K] in the pool's dtype, turned back where their slots lie as [K, V]."""
        slots = self.written().to(self.states.device)
        stored = self.states[slots]
        if self.axis_order is None:
            return stored
        return torch.where((self.axis_order[slots] == KV)[..., None, None, None], turned_back(stored), stored)


def turned(states: torch.Tensor) -> torch.Tensor:
    """[..., V, K] in VK as KV keeps it: the same shape, the elements of [..., K, V]."""
    return states.transpose(-1, -2).contiguous().view(states.shape)


def turned_back(states: torch.Tensor) -> torch.Tensor:
    """What turned() made of it."""
    V, K = states.shape[-2:]
    return states.reshape(*states.shape[:-2], K, V).transpose(-1, -2).contiguous()


def make_slots_case(
    *,
    batch: int = 3,
    nodes: int = 4,
    tree: bool = False,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 16,
    padding: tuple[int, ...] = (),
    own_slot: bool = False,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    orders: list[int] | None = None,
    gate_shift: float = 0.0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SlotsCase:
    """Unit-scale inputs; every slot that no row reads holds NaN, write slots included, and so do gaps.

    own_slot: row b reads the write slot of its node b % N (slots mode: of its root). orders: that of each row's read
    slot (None: no axis_order); other slots' orders are random.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = 1 + batch * (1 + nodes) + 3
    shuffled = 1 + torch.randperm(slots - 1, generator=generator)
    read_slots, write_slots = shuffled[:batch].clone(), shuffled[batch : batch * (1 + nodes)].view(batch, nodes).clone()
    if own_slot:
        rows = torch.arange(batch)
        read_slots = write_slots[rows, rows % nodes].clone()
    states = randn(slots, HV, V, K)
    unread = torch.ones(slots, dtype=torch.bool)
    unread[read_slots] = False
    states[unread] = math.nan
    axis_order = None
    if orders is not None:
        # of a generator of its own: the rest of the case is the same with and without orders
        bits = torch.Generator().manual_seed(seed)
        axis_order = torch.randint(0, 2, (slots,), generator=bits, dtype=torch.uint8)
        for slot, order in zip(read_slots.tolist(), orders, strict=True):
            axis_order[slot] = order
            if order == KV:
                states[slot] = turned(states[slot])
    for turn, b in enumerate(padding):
        # what a padding row may not touch is poisoned as well
        states[read_slots[b]] = math.nan
        read_slots[b] = 0 if turn % 2 == 0 else -1
        write_slots[b] = 0
    packed = randn(batch * nodes, 2 * H * K + HV * V).to(dtype).to(device)
    gates = torch.cat([randn(batch * nodes, HV) + gate_shift, randn(batch * nodes, HV)], 1).to(dtype).to(device)
    states = states.to(state_dtype).to(device)
    parents = random_tree_parents(batch, nodes, generator).to(index_dtype).to(device) if tree else None
    return SlotsCase(
        q=packed[:, : H * K].view(-1, H, K),
        k=packed[:, H * K : 2 * H * K].view(-1, H, K),
        v=packed[:, 2 * H * K :].view(-1, HV, V),
        a=gates[:, :HV],
        b=gates[:, HV:],
        A_log=(randn(HV) * 0.5).to(device),
        dt_bias=(randn(HV) * 0.5).to(device),
        scale=K**-0.5,
        states=gap_between_slots(states, 40) if strided else states,
        read_slots=read_slots.to(index_dtype).to(device),
        write_slots=write_slots.to(index_dtype).to(device),
        parents=parents,
        axis_order=None if axis_order is None else axis_order.to(device),
    )


def oracle(case: SlotsCase, *, stored: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in float64, node after node: o [live * N, HV, V] and states [live, N, HV, V, K].

    stored: the nodes of a tree go on from their parent's state as the pool keeps it.
    """
    x = {name: getattr(case, name).cpu().double() for name in (*INPUTS, "A_log", "dt_bias")}
    live, nodes, group = case.live().tolist(), case.nodes, x["v"].shape[1] // x["k"].shape[1]
    parents = chain_parents(case.read_slots.shape[0], nodes) if case.parents is None else case.parents.cpu()
    outputs, after = [], []
    for b in live:
        slot = int(case.read_slots[b])
        root = case.states[slot].cpu()
        if case.axis_order is not None and int(case.axis_order[slot]) == KV:
            root = turned_back(root)
        states: list[torch.Tensor] = []
        for i in range(nodes):
            token, parent = b * nodes + i, int(parents[b, i])
            state = root.double() if parent < 0 else states[parent]
            if stored and case.parents is not None:
                state = state.to(case.states.dtype).double()
            q, k = (x[name][token].repeat_interleave(group, 0) for name in ("q", "k"))
            q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            g = -x["A_log"].exp() * torch.nn.functional.softplus(x["a"][token] + x["dt_bias"])
            state = state * g.exp()[:, None, None]
            delta = x["b"][token].sigmoid()[:, None] * (x["v"][token] - (state @ k[:, :, None])[:, :, 0])
            states.append(state + delta[:, :, None] * k[:, None, :])
            outputs.append(case.scale * (states[i] @ q[:, :, None])[:, :, 0])
        after.append(torch.stack(states))
    shape = (0, nodes, *case.states.shape[1:])
    empty = torch.empty(shape, dtype=torch.float64)
    return (torch.stack(outputs), torch.stack(after)) if live else (empty.new_empty(0, *case.v.shape[1:]), empty)


def check_slots(case: SlotsCase, op: Callable[..., torch.Tensor], *, stored: bool, **extra: object) -> torch.Tensor:
    """Run op: outputs and written states against float64, padding rows zero, every other element of the pool as was."""
    on_gpu, dtype, state_dtype = case.q.is_cuda, case.q.dtype, case.states.dtype
    expected, after = oracle(case, stored=stored)
    before = case.clone()
    out = case.run(op, **extra)
    assert out.shape == case.v.shape and out.dtype == dtype
    tokens = (case.live()[:, None] * case.nodes + torch.arange(case.nodes)).reshape(-1)
    padding = torch.ones(out.shape[0], dtype=torch.bool)
    padding[tokens] = False
    assert not out.cpu()[padding].any(), "padding rows must come out as zeros"
    # stock's approximate exponentials and roots, along a path
    slack = 3 * FLOAT32_LIMIT if on_gpu else 0.0
    coarse = max((dtype, state_dtype), key=lambda kind: torch.finfo(kind).eps)
    assert_close("o", out.cpu()[tokens], expected, slack + limit_for(expected, coarse, on_gpu=on_gpu))
    limit = FLOAT32_LIMIT if state_dtype == torch.float32 else limit_for(after, state_dtype, on_gpu=on_gpu)
    assert_close("states", case.states_written().cpu(), after, slack + limit)
    rest = torch.ones(storage_of(case.states).shape, dtype=torch.bool)
    rest[positions_in_storage(case.states, (case.written().reshape(-1),))] = False
    assert_same_bits("other slots", storage_of(case.states)[rest], storage_of(before.states)[rest])
    for field in fields(case):
        value = getattr(case, field.name)
        if isinstance(value, torch.Tensor) and field.name != "states":
            assert_same_bits(field.name, value, getattr(before, field.name))
    return out
