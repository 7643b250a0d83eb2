"""The bookkeeping of a window (operands.Window): what a commit makes pending.

Which draft nodes became pending tokens. With p = pending[slot] before the step, `order[row, :p]` are the
pending tokens' window positions and node i of this step lies at `order[row, p + i]`. The verify folded the first f of
them: none if p <= fold_threshold, else all but the newest ones, or one step's (pending.py). So

    path  = nodes from the root to last_correct (parent walk), a of them
    order = order[f:p] ++ [order[p + i] for i in path] ++ the remaining positions, as they stood
    pending = p - f + a,  newest = min(a + lengths mod page, pending),  length = lengths + a

Only positions move; the tokens' inputs stay where the verify stored them. One program per batch row; the C positions of
a row are read in full before the first is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import INDICES, Arg, check
from .dependent import has_dependent_launch, wait_then_let_go
from .grid import launch_grid
from .operands import Rows, Window, check_lengths
from .pending import pending_and_folding


@triton.jit
def _path_mask(node, parents_row, N: tl.constexpr):
    """Bits of the nodes from `node` up to the root, itself included; 0 where node < 0."""
    mask = tl.full((), 0, tl.int64)
    current = tl.minimum(node, N - 1)
    while current >= 0:
        mask = mask | (tl.full((), 1, tl.int64) << current)
        above = tl.load(parents_row + current)
        # parents fall strictly in a valid tree: stop on anything else
        current = tl.where(above < current, above, -1)
    return mask


# by size or alignment of a batch nothing is gained, and a server would wait for each compilation
@triton.jit(do_not_specialize=["slots", "rows", "lengths", "last_correct", "steps_to_track", "stride_parents"])
def _commit_window_kernel(
    pending,
    newest,
    length,
    window_row,
    order,
    slots,
    rows,
    lengths,
    last_correct,
    steps_to_track,
    parents,
    track_count,
    fold_threshold,
    fold_at_once,
    stride_parents,
    PAGE: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_then_let_go(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    if slot <= 0:
        tl.store(track_count + b, 0)
        return
    row = tl.load(rows + b).to(tl.int64)
    before, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
    kept = before - folding
    parents_row = parents + b * stride_parents
    path = _path_mask(tl.load(last_correct + b).to(tl.int32), parents_row, N)

    lane = tl.arange(0, BLOCK_N).to(tl.int64)
    accepted_total = tl.sum(((path >> lane) & 1).to(tl.int32), axis=0)

    entry = tl.arange(0, BLOCK_C)
    inside = entry < C
    positions = tl.load(order + row * C + entry, mask=inside, other=0)
    node = entry - before
    is_node = (node >= 0) & (node < N)
    accepted = is_node & (((path >> tl.where(is_node, node, 0).to(tl.int64)) & 1) != 0)
    is_kept = (entry >= folding) & (entry < before)
    free = (is_kept == 0) & (accepted == 0)
    accepted_rank = tl.cumsum(accepted.to(tl.int32), axis=0) - 1
    free_rank = tl.cumsum(free.to(tl.int32), axis=0) - 1
    target = tl.where(
        accepted, kept + accepted_rank, tl.where(is_kept, entry - folding, kept + accepted_total + free_rank)
    )
    tl.debug_barrier()
    tl.store(order + row * C + target, positions, mask=inside & (target < C))
    tl.store(pending + slot, kept + accepted_total)
    tl.store(window_row + slot, row.to(tl.int32))
    if newest is not None:
        before_it = tl.load(lengths + b).to(tl.int32)
        tl.store(newest + slot, tl.minimum(accepted_total + before_it % PAGE, kept + accepted_total))
        tl.store(length + slot, before_it + accepted_total)

    count = 0
    if HAS_TRACK:
        tracked = _path_mask(tl.load(steps_to_track + b).to(tl.int32), parents_row, N)
        depth = tl.sum(((tracked >> lane) & 1).to(tl.int32), axis=0)
        count = tl.where(depth > 0, kept + depth, 0)
    tl.store(track_count + b, count)


def commit_window(
    window: Window,
    rows: Rows,
    *,
    window_row: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    track_count: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    """Make the accepted path of every row pending. One launch, no host read.

    window          pending is read and written at the slots, order at the rows; newest and length, where given, are
                    written at the slots.
    rows            slots, rows and parents are read; of padding only track_count is written.
    window_row      [S] int32: written at the slots, the request row whose window holds the slot's pending tokens.
    last_correct    [B] int32 or int64: read, last accepted node of each row; < 0: nothing was accepted.
    steps_to_track  [B] int32 or int64: read, node on the accepted path whose state is tracked; < 0: none. None: no row
                    is tracked.
    track_count     [>=B] int32: first B written, leading entries of the new order that give the tracked state, or 0.
    lengths         [B] int32 or int64: read, tokens of each request before the step. Needed where window has a length.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        pending=Arg(window.pending, "S"),
        window_row=Arg(window_row, "S", torch.int32),
        order=Arg(window.order, "R C"),
        slots=Arg(rows.slots, "B"),
        parents=Arg(rows.parents, ">=B N"),
        last_correct=Arg(last_correct, "B", INDICES),
        steps_to_track=Arg(steps_to_track, "B", INDICES),
        track_count=Arg(track_count, ">=B", torch.int32),
        lengths=Arg(lengths, "B", INDICES),
    )
    batch, nodes, capacity = sizes.get_all("B N C")
    window.check_room(nodes)
    check_lengths(window, lengths)
    if batch == 0:
        return
    overlap = has_dependent_launch(rows.slots.device)
    _commit_window_kernel[launch_grid(batch)](
        window.pending,
        window.newest,
        window.length,
        window_row,
        window.order,
        rows.slots,
        rows.rows,
        lengths,
        last_correct,
        steps_to_track,
        rows.parents,
        track_count,
        window.fold_threshold,
        window.fold_at_once,
        rows.trees.stride(0),
        PAGE=window.page,
        C=capacity,
        N=nodes,
        BLOCK_C=triton.next_power_of_2(capacity),
        BLOCK_N=triton.next_power_of_2(nodes),
        HAS_TRACK=steps_to_track is not None,
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
