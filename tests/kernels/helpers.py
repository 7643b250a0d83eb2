"""Shared by the kernel tests: error measures, draft trees, and the replay mode's bookkeeping filled at random."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds, Rows, Window, plan_width
from mamba_mtp_kernels.common.reference import plan_rows_reference

AnyWindow = TypeVar("AnyWindow", bound=Window)


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; infinite where anything is not finite, 0/0 is 0."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return math.inf
    error, norm = (actual - expected).norm().item(), expected.norm().item()
    if error == 0:
        return 0.0
    return error / norm if norm > 0 else math.inf


def run_compiling(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """python -m `module`, in a process whose Triton compiles and does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Fail with the figure unless rms_ratio(actual, expected) <= limit."""
    ratio = rms_ratio(actual, expected)
    assert ratio <= limit, f"{name}: RMS error ratio {ratio:.3e} over the limit {limit:.1e}"


def assert_same_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless both hold the same bytes: NaN equals the same NaN, and -0.0 is not 0.0."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (actual.shape, expected.shape)
    got, want = (t.detach().cpu().contiguous().view(torch.uint8) for t in (actual, expected))
    changed = int((got != want).sum())
    assert changed == 0, f"{name}: {changed} of {got.numel()} bytes differ"


#: RMS error ratio of two computations of the same numbers that round differently, by the dtype they are stored in.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


def assert_same_numbers(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits on a CPU. On a GPU variants of a kernel are compiled apart and contract products differently:
    there the same NaN in the same places, and elsewhere the same numbers but for rounding."""
    if not actual.is_cuda:
        assert_same_bits(name, actual, expected)
        return
    nowhere = expected.isnan()
    assert torch.equal(actual.isnan(), nowhere), f"{name}: NaN elsewhere"
    assert_close(name, actual.masked_fill(nowhere, 0), expected.masked_fill(nowhere, 0), ROUNDING[expected.dtype])


def chain_parents(batch: int, nodes: int) -> torch.Tensor:
    """parents [batch, nodes] int32 of chains."""
    return torch.arange(-1, nodes - 1, dtype=torch.int32).expand(batch, nodes).clone()


def random_tree_parents(batch: int, nodes: int, generator: torch.Generator) -> torch.Tensor:
    """parents [batch, nodes] int32 of random trees, nodes in topological order, root = node 0."""
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (batch,), generator=generator, dtype=torch.int32)
    return parents


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    """Strict-ancestor masks [B, N] int64 of the trees in parents [B, N]."""
    masks = torch.zeros(parents.shape, dtype=torch.int64)
    for row, tree in enumerate(parents.tolist()):
        for node, parent in enumerate(tree):
            if parent >= 0:
                masks[row, node] = masks[row, parent] | (1 << parent)
    return masks


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def planned(rows: Rows, window: Window, nodes: int) -> Rows:
    """The rows with the plan of a verify of this many nodes; beyond it there is garbage."""
    width = plan_width(nodes, window.fold_threshold) + 4
    plan = torch.full((rows.batch + 1, width), 10**6, dtype=torch.int32, device=rows.slots.device)
    plan_rows_reference(window, replace(rows, plan=plan, schedule=None), nodes=nodes)
    return replace(rows, plan=plan)


def unfit_plans(rows: Rows, nodes: int, fold_threshold: int) -> Iterator[tuple[Rows, str]]:
    """Planned rows without a plan and with one that is too narrow, and what is said then."""
    yield replace(rows, plan=None), "plan: None, but an op asks for the step's plan"
    width = plan_width(nodes, fold_threshold)
    narrow = rows.plan[:, : width - 1]
    yield replace(rows, plan=narrow), rf"plan: shape \({rows.batch + 1}, {width - 1}\), expected {width} numbers a row"


def plan_alone(rows: Rows) -> Rows:
    """Planned rows of which nothing but the plan says where they are."""
    return replace(rows, slots=torch.full_like(rows.slots, -1), rows=torch.full_like(rows.rows, 10**6))


def gap_between_slots(pool: torch.Tensor, gap: int, fill: float = math.nan) -> torch.Tensor:
    """A copy of pool [S, ...] whose slots lie `gap` elements further apart; the gaps hold `fill`."""
    inner = pool[0].numel()
    flat = torch.full((pool.shape[0], inner + gap), fill, dtype=pool.dtype, device=pool.device)
    view = flat[:, :inner].view(pool.shape)
    view.copy_(pool)
    return view


@dataclass
class Bookkeeping:
    """The pool's integers for one batch (shapes: operands.Rows and operands.Window). Padding rows have slot <= 0.
    newest and length are given together or not at all. one_tree: the kernels get the first row's tree for every row, as
    a store gives it to them where all trees are chains."""

    slots: torch.Tensor
    rows: torch.Tensor
    pending: torch.Tensor
    window_row: torch.Tensor
    order: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    fold_threshold: int
    newest: torch.Tensor | None = None
    length: torch.Tensor | None = None
    page: int = 1
    one_tree: bool = False

    @property
    def batch(self) -> int:
        return self.slots.shape[0]

    @property
    def nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def capacity(self) -> int:
        return self.order.shape[1]

    @property
    def batch_rows(self) -> Rows:
        """The batch as the kernels take it."""
        parents, ancestors = self.parents, self.ancestors
        if self.one_tree:
            # what a kernel finds that looks for the other rows'
            tables = ((parents, 1), (ancestors, -1))
            parents, ancestors = (
                torch.cat([table[:1], torch.full_like(table[1:], garbage)])[:1].expand_as(table)
                for table, garbage in tables
            )
        return Rows(self.slots, self.rows, parents=parents, ancestors=ancestors)

    def put_nodes(self, *given: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write values [B*N, ...] of the batch's nodes to their places in a window's tensor [R, C, ...]; pairs of both,
        the window first."""
        live = (self.slots > 0).nonzero()[:, 0]
        first = self.pending[self.slots[live].long()].long()
        row = self.rows[live].long()[:, None]
        position = self.order[row, first[:, None] + torch.arange(self.nodes, device=first.device)].long()
        for window, values in given:
            window[row, position] = values.unflatten(0, (self.batch, self.nodes))[live].to(window.dtype)

    def settling(self, batch_rows: slice = slice(None)) -> Folds:
        """What folds all pending tokens of these batch rows in place."""
        slots, rows = self.slots[batch_rows], self.rows[batch_rows]
        return Folds(slots, slots, rows, self.pending[slots.long()])

    def window(self, kind: type[AnyWindow], **inputs: torch.Tensor) -> AnyWindow:
        """A family's window over this bookkeeping."""
        kept = {"newest": self.newest, "length": self.length, "page": self.page}
        return kind(self.pending, self.order, self.fold_threshold, **kept, **inputs)

    def assert_same(self, other: Bookkeeping) -> None:
        """Fail with a name unless all tensors hold the same bytes."""
        for name, held in vars(other).items():
            if isinstance(held, torch.Tensor):
                assert_same_bits(name, getattr(self, name), held)

    def to(self, device: torch.device | str) -> Bookkeeping:
        return self._map(lambda tensor: tensor.to(device))

    def clone(self) -> Bookkeeping:
        return self._map(torch.Tensor.clone)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Bookkeeping:
        fields = vars(self).items()
        return Bookkeeping(**{name: change(x) if isinstance(x, torch.Tensor) else x for name, x in fields})

    def folding(self, row: int) -> int:
        """How many tokens the next verify folds of batch row `row`: all but the newest of more than the threshold,
        16 at most unless a draft has more nodes."""
        slot, pending = int(self.slots[row]), self.pending_of(row)
        if pending <= self.fold_threshold:
            return 0
        at_once = 16 * max(1, -(-((self.capacity - self.fold_threshold) // 2) // 16))
        return min(pending if self.newest is None else pending - int(self.newest[slot]), at_once)

    def pending_of(self, row: int) -> int:
        """Pending tokens of batch row `row`; 0 for a padding row."""
        slot = int(self.slots[row])
        return int(self.pending[slot]) if slot > 0 else 0

    def free_entries(self) -> torch.Tensor:
        """bool [R, C]: window positions that hold no pending token of any row of this batch."""
        free = torch.ones(self.order.shape, dtype=torch.bool)
        for b in range(self.batch):
            if self.slots[b] > 0:
                row = int(self.rows[b])
                free[row, self.order[row, : self.pending_of(b)].long().cpu()] = False
        return free


#: Windows whose rows a verify folds itself, for either family: all in one step, as many as one holds (of a long window,
#: too), in more steps.
FOLDING = (
    {},
    {"nodes": 8, "fold_threshold": 16, "pending": [17, 24, 20]},
    {"nodes": 3, "fold_threshold": 40, "pending": [41, 43, 42]},
    {"nodes": 17, "fold_threshold": 3, "pending": [4, 20, 17]},
)


def _dtype_pairs() -> list:
    """Where the two are alike, and bf16 beside float32, with any Triton; the rest with one: how a cast rounds is the
    interpreter's, which products are taken is not."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    everywhere = {(dtype, dtype) for dtype in floats} | {(torch.bfloat16, torch.float32)}
    return [
        pytest.param(*pair, id="in_{}-state_{}".format(*pair), marks=() if pair in everywhere else pytest.mark.once)
        for pair in itertools.product(floats, floats)
    ]


DTYPE_PAIRS = pytest.mark.parametrize(("dtype", "state_dtype"), _dtype_pairs())
"""Of the tokens and of the state they are folded into."""


def settled_by(
    fold: Callable[..., None], case: Any, axis_order: torch.Tensor | None = None, dst: torch.Tensor | None = None
) -> None:
    """Fold all that is pending of a family's case's live rows, in place or into dst, and leave nothing pending in
    place."""
    books = case.books
    folds = books.settling()
    case.fold(fold, folds if dst is None else replace(folds, dst=dst), axis_order)
    if dst is None:
        books.pending[books.slots.long()] = 0


def folded_by(fold: Callable[..., None], case: Any, axis_order: torch.Tensor | None = None) -> None:
    """Fold in place what the next verify of a family's case would fold itself, and leave the rest pending."""
    books = case.books
    counts = torch.tensor([books.folding(b) for b in range(books.batch)], dtype=torch.int32, device=books.slots.device)
    case.fold(fold, replace(books.settling(), counts=counts), axis_order)
    for row, count in zip(books.rows.tolist(), counts.tolist(), strict=True):
        books.order[row] = books.order[row].roll(-count)
    books.pending[books.slots.long()] -= counts


def random_bookkeeping(
    *,
    parents: torch.Tensor,
    pending: list[int],
    fold_threshold: int,
    generator: torch.Generator,
    padding: tuple[int, ...] = (),
    spare: int = 3,
    index_dtype: torch.dtype = torch.int32,
    newest: list[int] | None = None,
) -> Bookkeeping:
    """Distinct random slots and rows, permuted window orders, and these pending counts.

    parents [B, N]; pending holds B counts (each at most fold_threshold + N); batch rows listed in `padding` get slot
    0 and -1 in turn and a row index that must not be read. `spare` slots and rows belong to nobody in the batch and
    carry garbage counts. newest: B counts, each at most the row's pending ones and the threshold; None: a window that
    does not keep them.
    """
    batch, nodes = parents.shape
    capacity = fold_threshold + 2 * nodes
    assert len(pending) == batch and max(pending) <= fold_threshold + nodes
    slot_count, row_count = batch + spare + 1, batch + spare
    slots = 1 + torch.randperm(slot_count - 1, generator=generator)[:batch]
    rows = torch.randperm(row_count, generator=generator)[:batch]
    order = torch.stack([torch.randperm(capacity, generator=generator) for _ in range(row_count)]).to(torch.int32)
    counts = torch.full((slot_count,), 1_000_000, dtype=torch.int32)
    counts[slots] = torch.tensor(pending, dtype=torch.int32)
    kept: dict[str, torch.Tensor] = {}
    if newest is not None:
        assert all(stay <= min(have, fold_threshold) for stay, have in zip(newest, pending, strict=True))
        kept = {name: torch.full((slot_count,), -1_000_000, dtype=torch.int32) for name in ("newest", "length")}
        kept["newest"][slots] = torch.tensor(newest, dtype=torch.int32)
    window_row = torch.full((slot_count,), -7, dtype=torch.int32)
    window_row[slots] = rows.to(torch.int32)
    for turn, b in enumerate(padding):
        counts[slots[b]] = 1_000_000
        if newest is not None:
            kept["newest"][slots[b]] = -1_000_000
        slots[b] = 0 if turn % 2 == 0 else -1
        rows[b] = -1_000_000
    return Bookkeeping(
        slots=slots.to(index_dtype),
        rows=rows.to(index_dtype),
        pending=counts,
        window_row=window_row,
        order=order,
        parents=parents,
        ancestors=ancestors_of(parents),
        fold_threshold=fold_threshold,
        **kept,
    )


def random_newest(pending: list[int], fold_threshold: int, generator: torch.Generator) -> list[int]:
    """Newest counts that go with these pending ones, from none to as many as there may be."""
    most = [min(count, fold_threshold) for count in pending]
    return [int(torch.randint(0, top + 1, (1,), generator=generator)) for top in most]


def tree_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """retrieve_next_token and retrieve_next_sibling [B, N] int64 of the trees, as SGLang's tree builder fills them."""
    next_token, next_sibling = (torch.full(parents.shape, -1, dtype=torch.int64) for _ in range(2))
    for row, tree in enumerate(parents.tolist()):
        for node in range(len(tree) - 1, 0, -1):
            next_sibling[row, node] = next_token[row, tree[node]]
            next_token[row, tree[node]] = node
    return next_token, next_sibling
