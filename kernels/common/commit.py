"""Commit of a verify step in the window's bookkeeping: which draft nodes became pending tokens.

With p = pending[slot] before the step, `order[row, :p]` are the pending tokens' window positions and node i of this
step lies at `order[row, p + i]`. The verify folded the pending tokens if p > fold_threshold. So

    kept  = p if p <= fold_threshold else 0
    path  = nodes from the root to last_correct (parent walk), a of them
    order = order[:kept] ++ [order[p + i] for i in path] ++ the remaining positions, as they stood
    pending = kept + a

Only positions move; the tokens' inputs stay where the verify stored them. One program a batch row; the C positions of
a row are read in full before the first is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import check_dtype, check_index, check_inner_contiguous, check_same_device, check_shape


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


@triton.jit
def _commit_window_kernel(
    pending,
    window_row,
    order,
    slots,
    rows,
    last_correct,
    steps_to_track,
    parents,
    track_count,
    fold_threshold,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TRACK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    if slot <= 0:
        tl.store(track_count + b, 0)
        return
    row = tl.load(rows + b).to(tl.int64)
    before = tl.load(pending + slot)
    kept = tl.where(before > fold_threshold, 0, before)
    parents_row = parents + b * N
    path = _path_mask(tl.load(last_correct + b).to(tl.int32), parents_row, N)

    lane = tl.arange(0, BLOCK_N).to(tl.int64)
    accepted_total = tl.sum(((path >> lane) & 1).to(tl.int32), axis=0)

    entry = tl.arange(0, BLOCK_C)
    inside = entry < C
    positions = tl.load(order + row * C + entry, mask=inside, other=0)
    node = entry - before
    is_node = (node >= 0) & (node < N)
    accepted = is_node & (((path >> tl.where(is_node, node, 0).to(tl.int64)) & 1) != 0)
    free = (entry >= kept) & (accepted == 0)
    accepted_rank = tl.cumsum(accepted.to(tl.int32), axis=0) - 1
    free_rank = tl.cumsum(free.to(tl.int32), axis=0) - 1
    target = tl.where(accepted, kept + accepted_rank, tl.where(free, kept + accepted_total + free_rank, entry))
    tl.debug_barrier()
    tl.store(order + row * C + target, positions, mask=inside & (target < C))
    tl.store(pending + slot, kept + accepted_total)
    tl.store(window_row + slot, row.to(tl.int32))

    count = 0
    if HAS_TRACK:
        tracked = _path_mask(tl.load(steps_to_track + b).to(tl.int32), parents_row, N)
        depth = tl.sum(((tracked >> lane) & 1).to(tl.int32), axis=0)
        count = tl.where(depth > 0, kept + depth, 0)
    tl.store(track_count + b, count)


def commit_window(
    *,
    pending: torch.Tensor,
    window_row: torch.Tensor,
    order: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    parents: torch.Tensor,
    fold_threshold: int,
    track_count: torch.Tensor,
) -> None:
    """Make the accepted path of every row pending. One launch, no host read.

    pending         [S] int32, read and written at `slots`: tokens not yet folded into the checkpoint.
    window_row      [S] int32, written at `slots`: the row whose window holds them.
    order           [R, C] int32, contiguous, read and written at `rows`: permutation of the window positions.
    slots, rows     [B] int32 or int64; batch rows with slot <= 0 are padding: only track_count is written.
    last_correct    [B] int32 or int64: node id of the last accepted node, < 0 where nothing was accepted.
    steps_to_track  [B] int32 or int64 or None: node on the accepted path whose state is tracked, < 0 for none.
    parents         [>=B, N] int32 from build_tree.
    fold_threshold  rows with pending > fold_threshold were folded by this step's verify.
    track_count     [>=B] int32, first B written: leading entries of the new order that give the tracked state, or 0.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    nodes = parents.shape[1]
    batch = slots.shape[0]
    capacity = order.shape[1]
    slot_count = pending.shape[0]
    check_index("pending", pending, None)
    check_index("window_row", window_row, slot_count)
    for name, tensor in {"pending": pending, "window_row": window_row, "order": order, "parents": parents}.items():
        check_dtype(name, tensor, (torch.int32,))
    check_shape("order", order, (None, None))
    check_shape("parents", parents, (None, None))
    check_inner_contiguous("order", order, 2)
    check_inner_contiguous("parents", parents, 2)
    check_index("slots", slots, batch)
    check_index("rows", rows, batch)
    check_index("last_correct", last_correct, batch)
    if steps_to_track is not None:
        check_index("steps_to_track", steps_to_track, batch)
    check_index("track_count", track_count, None)
    check_dtype("track_count", track_count, (torch.int32,))
    if parents.shape[0] < batch or track_count.shape[0] < batch:
        raise ValueError(
            f"batch {batch} exceeds parents' {parents.shape[0]} or track_count's {track_count.shape[0]} rows"
        )
    if fold_threshold < 0 or fold_threshold + 2 * nodes > capacity:
        raise ValueError(
            f"fold_threshold {fold_threshold}, {nodes} nodes: C must be >= {fold_threshold + 2 * nodes}, got {capacity}"
        )
    check_same_device(
        pending=pending,
        window_row=window_row,
        order=order,
        slots=slots,
        rows=rows,
        last_correct=last_correct,
        steps_to_track=steps_to_track,
        parents=parents,
        track_count=track_count,
    )
    if batch == 0:
        return
    _commit_window_kernel[(batch,)](
        pending,
        window_row,
        order,
        slots,
        rows,
        last_correct,
        steps_to_track,
        parents,
        track_count,
        fold_threshold,
        C=capacity,
        N=nodes,
        BLOCK_C=triton.next_power_of_2(capacity),
        BLOCK_N=triton.next_power_of_2(nodes),
        HAS_TRACK=steps_to_track is not None,
        num_warps=1,
    )
