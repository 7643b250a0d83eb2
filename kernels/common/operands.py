"""What travels between a store and its kernels: states, a batch's rows, the slots of its nodes, windows, folds.

Each is built, and checked in itself, once; a launcher checks how they fit together, and what float dtypes it takes (the
references take float64 too). Contents change under them (tensors are the pool's own), their shapes do not. S slots, R
request rows, B batch rows of N draft nodes, C window positions, L layers.
No triton in this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch

from .arguments import INDICES, Arg, check
from .axis_order import KV, VK

MAX_NODES = 64  # an ancestor mask is one int64
FOLD_TOKENS = 16  # what a tensor core sums at once: a fold takes tokens in steps of as many
PLAN_NEWEST = 4  # last tokens of a kind whose places a plan has: what a convolution reaches, and one more
PLAN_ROOT = 4 + 2 * PLAN_NEWEST  # where a plan has the places of a row's nodes


def fold_at_once(nodes: int) -> int:
    """Tokens that a verify folds at most, where the largest has this many nodes: whole steps."""
    return FOLD_TOKENS * max(1, -(-nodes // FOLD_TOKENS))


def plan_width(nodes: int, fold_threshold: int) -> int:
    """Numbers of a row's plan, for verifies of up to this many nodes: a multiple of four, so that of a contiguous plan
    the first four of every row lie in one sector of memory."""
    return -(-(PLAN_ROOT + nodes + fold_threshold) // 4) * 4


def check_nodes(nodes: int) -> None:
    """Raise ValueError where a draft tree has more nodes than an ancestor mask has bits."""
    if nodes > MAX_NODES:
        raise ValueError(f"parents: {nodes} nodes, the ancestor mask holds {MAX_NODES}")


def check_lengths(window: Window, lengths: torch.Tensor | None) -> None:
    """Raise ValueError where a window keeps its slots' lengths and a commit does not say them."""
    if window.length is not None and lengths is None:
        raise ValueError("lengths: None, but the window keeps its slots' lengths")


@dataclass(frozen=True, eq=False)
class States:
    """Recurrent states in their slots.

    data        [S, heads, V, K] or, of all layers, [L, S, heads, V, K] float, a head contiguous (any other strides):
                what a kernel reads and writes. Mamba2: V is headdim, K dstate.
    axis_order  [S] uint8, VK or KV (axis_order.py): how each slot lies. None: all are VK. Kernels only read it: who
                has written a slot elsewhere than in place sets its entry to `write`.
    write       VK or KV: how states are written, except in place, where a slot stays as it lies, and except by a
                verify of slots mode, which leaves every slot as it lies. KV needs an axis_order.
    """

    data: torch.Tensor
    axis_order: torch.Tensor | None = None
    write: int = VK

    def __post_init__(self) -> None:
        check(
            states=Arg(self.data, "... S H V K", contiguous=2),
            axis_order=Arg(self.axis_order, "S", torch.uint8),
        )
        if self.write not in (VK, KV):
            raise ValueError(f"write: {self.write!r}, expected VK ({VK}) or KV ({KV})")
        if self.write == KV and self.axis_order is None:
            raise ValueError("write: KV without an axis_order to say so")

    def layer(self, index: int) -> States:
        """The states of one layer, where those of all layers are given."""
        return replace(self, data=self.data[index])


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch.

    slots      [B] int32 or int64: state slot of each row; <= 0 is padding, of which a kernel writes zero outputs and
               nothing else. Distinct where not padding.
    rows       [B] int32 or int64: request row of each row, whose window it reads and writes. Distinct; not looked at
               where the slot is padding.
    parents    [>=B, N] int32, any row stride: parent of each draft node, -1 at a root (tree.build_tree; of chains
               chain.chain_tree). None where nobody asks.
    ancestors  [>=B, N] int64, any row stride: bit j of node i is set iff j is a strict ancestor of i. None where nobody
               asks.
    schedule   [>=B] int32: order in which a kernel may start its rows; any permutation gives the same results. None:
               as they lie.
    plan       [>=B, P] int32, P >= plan_width(N, fold_threshold): what plan.plan_rows says of each row
               before a verify of N nodes. Four numbers: the slot (0: padding, and so is all else), the request row,
               pending tokens, how many of them the verify folds. Then positions in its window, oldest token first: of
               the PLAN_NEWEST newest tokens that it folds, and of as many pending ones (0 where there are fewer); from
               PLAN_ROOT on of the N nodes; then, fold_threshold of them, of the tokens that stay pending and of what
               comes after these. None where nobody asks.
    chain      every row's tree is a chain, whatever its links say to those who do not ask.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    parents: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    schedule: torch.Tensor | None = None
    plan: torch.Tensor | None = None
    chain: bool = False

    def __post_init__(self) -> None:
        check(
            slots=Arg(self.slots, "B", INDICES),
            rows=Arg(self.rows, "B", INDICES),
            parents=Arg(self.parents, ">=B N", torch.int32),
            ancestors=Arg(self.ancestors, ">=B N", torch.int64),
            schedule=Arg(self.schedule, ">=B", torch.int32),
            plan=Arg(self.plan, ">=B _", torch.int32),
        )

    @property
    def batch(self) -> int:
        return self.slots.shape[0]

    @property
    def trees(self) -> torch.Tensor:
        """The parents of the batch's nodes [B, N]. Raises ValueError where none are given."""
        if self.parents is None:
            raise ValueError("parents: None, but an op asks for the draft trees")
        return self.parents[: self.batch]

    def plan_for(self, nodes: int = 0, fold_threshold: int = 0) -> torch.Tensor:
        """The plan of the batch's rows [B, P]. Raises ValueError where none is given, or one too narrow for a verify of
        this many nodes; 0: for those who ask of tokens before them alone."""
        if self.plan is None:
            raise ValueError("plan: None, but an op asks for the step's plan")
        width = plan_width(nodes, fold_threshold)
        if self.plan.shape[1] < width:
            raise ValueError(f"plan: shape {tuple(self.plan.shape)}, expected {width} numbers a row or more")
        return self.plan[: self.batch]


@dataclass(frozen=True, eq=False)
class NodeSlots:
    """Where a verify of slots mode reads each row's state and writes the one after each of its nodes.

    read     [B] int32 or int64: slot of each row's newest state; <= 0 is padding: zero outputs, nothing written.
    write    [>=B, N] int32 or int64, any row stride: slot of the state after each node, in the axis order that the slot
             has; <= 0: written nowhere (and then the node has no children). Distinct over the batch. A row's read slot
             may be among its own write slots (slots mode: it is its root's), never among another row's.
    parents  [>=B, N] int32 or int64, any row stride: -1 at a root, else a node before. None: chains.
    """

    read: torch.Tensor
    write: torch.Tensor
    parents: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check(
            read_slots=Arg(self.read, "B", INDICES),
            write_slots=Arg(self.write, ">=B N", INDICES),
            parents=Arg(self.parents, ">=B N", INDICES),
        )


@dataclass(frozen=True, eq=False)
class SlotBooks:
    """Where each request's newest state lies in slots mode (draft_slots.py). Request row r owns the M draft slots from
    first_draft_slot + r * M on; with its request's canonical slot they are the places of a verify of up to M + 1 nodes.

    current_input     [R] int32: draft slot of the row's last accepted node; -1: its canonical slot is the newest.
    row_slot          [R] int32: canonical slot that the row served when it last committed.
    slot_row          [S] int32: row that last committed for each canonical slot; -1: none.
    first_draft_slot  > 0.
    slots_per_row     M >= 0.
    """

    current_input: torch.Tensor
    row_slot: torch.Tensor
    slot_row: torch.Tensor
    first_draft_slot: int
    slots_per_row: int

    def __post_init__(self) -> None:
        check(
            current_input=Arg(self.current_input, "R", torch.int32),
            row_slot=Arg(self.row_slot, "R", torch.int32),
            slot_row=Arg(self.slot_row, "S", torch.int32),
        )
        if self.first_draft_slot <= 0 or self.slots_per_row < 0:
            raise ValueError(
                f"first_draft_slot {self.first_draft_slot}, slots_per_row {self.slots_per_row}: expected > 0 and >= 0"
            )


@dataclass(frozen=True, eq=False)
class Folds:
    """What to fold outside a verify, in all layers: the first counts[b] tokens of order[rows[b]], onto the state in
    src[b], into dst[b]. All [B] int32 or int64.

    src, dst  slots; <= 0: nothing is done. No dst is another entry's src or dst. Where dst is src the state keeps its
              axis order.
    rows      request rows; not looked at where the count is 0.
    counts    0 copies, and does nothing where dst is src.
    """

    src: torch.Tensor
    dst: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor

    def __post_init__(self) -> None:
        check(
            src_slots=Arg(self.src, "B", INDICES),
            dst_slots=Arg(self.dst, "B", INDICES),
            rows=Arg(self.rows, "B", INDICES),
            counts=Arg(self.counts, "B", INDICES),
        )


@dataclass(frozen=True, eq=False)
class Window:
    """The windows of all request rows: a family's subclass adds the inputs of its recurrence.

    pending         [S] int32: how many tokens of each slot's request are not in its state yet. A verify reads it, the
                    commit writes it.
    order           [R, C] int32, contiguous: a permutation of each row's positions. Its first `pending` entries hold
                    the pending tokens, oldest first; node i of a running verify is at entry pending + i.
    fold_threshold  rows with more pending tokens than this are folded by their next verify, the oldest `fold_at_once`
                    of them at most. C >= fold_threshold + 2 N.
    newest          [S] int32: how many of the pending tokens, the last ones, a fold leaves: those of the newest commit,
                    since whoever learns a step late that a request has ended may still take them back, and those since
                    the last multiple of `page` before them. At most fold_threshold. None: a fold takes all.
    length          [S] int32: tokens that each slot's state and its pending ones hold together; a commit writes it.
                    Together with newest, or None.
    page            states are asked for at multiples of this length; 1 without newest.

    A subclass's tensors are [R, C, ...] or, of all layers, [L, R, C, ...].
    """

    pending: torch.Tensor
    order: torch.Tensor
    fold_threshold: int
    newest: torch.Tensor | None = field(default=None, kw_only=True)
    length: torch.Tensor | None = field(default=None, kw_only=True)
    page: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.fold_threshold < 0:
            raise ValueError(f"fold_threshold: {self.fold_threshold}, expected 0 or more")
        if (self.newest is None) != (self.length is None):
            raise ValueError("newest and length must be given together or not at all")
        if self.page < 1 or (self.page > 1 and self.newest is None):
            raise ValueError(f"page: {self.page}, expected 1, or more where newest is given")
        check(
            pending=Arg(self.pending, "S", torch.int32),
            newest=Arg(self.newest, "S", torch.int32),
            length=Arg(self.length, "S", torch.int32),
            order=Arg(self.order, "R C", torch.int32, contiguous=2),
            **{name: arg._replace(dtypes=None) for name, arg in self.inputs_as("... R C").items()},
        )

    @classmethod
    def input_names(cls) -> tuple[str, ...]:
        """Names of the family's inputs, in the order of their declaration."""
        return tuple(field.name for field in fields(cls))[len(fields(Window)) :]

    def inputs_as(self, leading: str) -> dict[str, Arg]:
        """The family's inputs for `check`: a subclass gives the sizes after those `leading` ones."""
        return {}

    @property
    def fold_at_once(self) -> int:
        """Tokens of a row, the oldest, that a verify folds at most: one step, or as many as the nodes of the largest
        verify need, so that no more than fold_threshold stay pending."""
        return fold_at_once((self.order.shape[1] - self.fold_threshold) // 2)

    def folding(self, slots: torch.Tensor) -> torch.Tensor:
        """How many tokens the next verify folds of each of `slots` [B] int64, none of them padding; [B] int32. In
        PyTorch, for the references and for counts; kernels ask pending.pending_and_folding, or a plan made with it."""
        before = self.pending[slots]
        stay = 0 if self.newest is None else self.newest[slots]
        return torch.where(before > self.fold_threshold, (before - stay).clamp(max=self.fold_at_once), 0)

    def check_room(self, nodes: int) -> None:
        """Raise ValueError unless a verify of this many nodes fits beside what it folds."""
        capacity = self.order.shape[1]
        if capacity < self.fold_threshold + 2 * nodes:
            raise ValueError(f"order: capacity {capacity}, expected at least {self.fold_threshold} + 2 * {nodes}")

    def layer(self, index: int) -> Self:
        """The window of one layer, where those of all layers are given."""
        return replace(self, **{name: getattr(self, name)[index] for name in self.input_names()})

    def of_all_layers(self) -> Self:
        """The window of the only layer there is, where that of one layer is given."""
        return replace(self, **{name: getattr(self, name)[None] for name in self.input_names()})
