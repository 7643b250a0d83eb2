"""Slots mode's bookkeeping: where a request's newest state lies, in three small device arrays.

A request row r owns the draft slots first_draft_slot + r*M .. + M-1, one a draft node: a verify writes node i's state
to the i-th of them and the next verify reads the accepted node's.

    current_input [R] int32  draft slot of the row's last accepted node, -1: the canonical slot is the newest
    row_slot      [R] int32  canonical slot that the row served when it last committed
    slot_row      [S] int32  row that last committed for the slot, -1: none

Rows and slots are recycled independently, so current_input[r] speaks of slot s only while row_slot[r] == s. Each op
is elementwise over the batch: one launch, no host read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import check_dtype, check_index, check_inner_contiguous, check_same_device, check_shape

BLOCK = 128
NUM_WARPS = BLOCK // 32


@triton.jit
def _place_nodes_kernel(
    read_slots,
    write_slots,
    slots,
    rows,
    current_input,
    row_slot,
    first_draft_slot,
    nodes_per_row,
    total,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < total
    b, node = entry // N, entry % N
    slot = tl.load(slots + b, mask=inside, other=0).to(tl.int32)
    real = inside & (slot > 0)
    row = tl.load(rows + b, mask=real, other=0).to(tl.int64)
    draft_slot = first_draft_slot + row.to(tl.int32) * nodes_per_row + node
    tl.store(write_slots + entry, tl.where(real, draft_slot, 0), mask=inside)
    newest = tl.load(current_input + row, mask=real, other=-1)
    served = tl.load(row_slot + row, mask=real, other=-1)
    read = tl.where(slot > 0, tl.where((newest > 0) & (served == slot), newest, slot), 0)
    tl.store(read_slots + b, read, mask=inside & (node == 0))


@triton.jit
def _commit_slots_kernel(
    current_input,
    row_slot,
    slot_row,
    slots,
    rows,
    last_correct,
    steps_to_track,
    track_src,
    first_draft_slot,
    nodes_per_row,
    batch,
    HAS_TRACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < batch
    slot = tl.load(slots + b, mask=inside, other=0).to(tl.int64)
    real = inside & (slot > 0)
    row = tl.load(rows + b, mask=real, other=0).to(tl.int64)
    last = tl.load(last_correct + b, mask=real, other=-1).to(tl.int32)
    draft_slot = first_draft_slot + row.to(tl.int32) * nodes_per_row
    accepts = real & (last >= 0)
    tl.store(current_input + row, draft_slot + last, mask=accepts)
    tl.store(row_slot + row, slot.to(tl.int32), mask=accepts)
    tl.store(slot_row + slot, row.to(tl.int32), mask=accepts)
    tracked = tl.zeros((BLOCK,), tl.int32)
    if HAS_TRACK:
        step = tl.load(steps_to_track + b, mask=real, other=-1).to(tl.int32)
        tracked = tl.where(step >= 0, draft_slot + step, 0)
    tl.store(track_src + b, tracked, mask=inside)


@triton.jit
def _drafted(slots, current_input, row_slot, slot_row, b, inside):
    """slot, the row that last committed for it, and the draft slot of its newest state, <= 0 where there is none."""
    slot = tl.load(slots + b, mask=inside, other=0).to(tl.int64)
    row = tl.load(slot_row + slot, mask=slot > 0, other=-1).to(tl.int64)
    served = tl.load(row_slot + row, mask=row >= 0, other=-1)
    newest = tl.load(current_input + row, mask=(row >= 0) & (served == slot), other=-1)
    return slot, row, newest


@triton.jit
def _newest_slots_kernel(newest, slots, current_input, row_slot, slot_row, batch, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, _, drafted = _drafted(slots, current_input, row_slot, slot_row, b, b < batch)
    found = tl.where(drafted > 0, drafted, tl.maximum(slot, 0).to(tl.int32))
    tl.store(newest + b, found, mask=b < batch)


@triton.jit
def _forget_inputs_kernel(slots, current_input, row_slot, slot_row, batch, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, row, drafted = _drafted(slots, current_input, row_slot, slot_row, b, b < batch)
    tl.store(current_input + row, tl.full((BLOCK,), -1, tl.int32), mask=drafted > 0)


def place_nodes(
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    slots: torch.Tensor,
    rows: torch.Tensor,
    current_input: torch.Tensor,
    row_slot: torch.Tensor,
    first_draft_slot: int,
    nodes_per_row: int,
) -> None:
    """Where the coming verify of N nodes reads each row's state and writes each node's.

    read_slots   [>=B] int32, first B written: the row's newest state (0 for padding).
    write_slots  [>=B, N] int32, contiguous, first B rows written: the nodes' draft slots (0 for padding).
    slots, rows  [B] int32 or int64; slot <= 0 is padding, its row is not read.
    current_input, row_slot
                 [R] int32, read at `rows`.
    nodes_per_row
                 M >= N, draft slots a request row owns.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch, nodes = slots.shape[0], write_slots.shape[1]
    check_index("slots", slots, None)
    check_index("rows", rows, batch)
    check_shape("write_slots", write_slots, (None, None))
    check_inner_contiguous("write_slots", write_slots, 2)
    check_dtype("write_slots", write_slots, (torch.int32,))
    _check_int32("row_slot", row_slot, current_input.shape[0])
    _check_int32("current_input", current_input, None)
    _check_int32("read_slots", read_slots, None)
    if batch > min(read_slots.shape[0], write_slots.shape[0]):
        raise ValueError(
            f"batch {batch} exceeds read_slots' {read_slots.shape[0]} or write_slots' {write_slots.shape[0]} rows"
        )
    _check_region(first_draft_slot, nodes_per_row)
    if nodes > nodes_per_row:
        raise ValueError(f"write_slots: {nodes} nodes, a request row owns {nodes_per_row} draft slots")
    check_same_device(
        read_slots=read_slots,
        write_slots=write_slots,
        slots=slots,
        rows=rows,
        current_input=current_input,
        row_slot=row_slot,
    )
    if batch == 0 or nodes == 0:
        return
    _place_nodes_kernel[(triton.cdiv(batch * nodes, BLOCK),)](
        read_slots,
        write_slots,
        slots,
        rows,
        current_input,
        row_slot,
        first_draft_slot,
        nodes_per_row,
        batch * nodes,
        N=nodes,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def commit_slots(
    *,
    current_input: torch.Tensor,
    row_slot: torch.Tensor,
    slot_row: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    first_draft_slot: int,
    nodes_per_row: int,
    track_src: torch.Tensor,
) -> None:
    """Make the last accepted node's draft slot the input of each row's next verify.

    current_input, row_slot
                    [R] int32, written at `rows`.
    slot_row        [S] int32, written at `slots`.
    slots, rows     [B] int32 or int64; slot <= 0 is padding: only track_src is written.
    last_correct    [B] int32 or int64: node id of the last accepted node; < 0 leaves the row as it is.
    steps_to_track  [B] int32 or int64 or None: node whose state is tracked, < 0 for none.
    nodes_per_row   M, draft slots a request row owns; node ids are below it.
    track_src       [>=B] int32, first B written: draft slot of the tracked node, or 0.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch = slots.shape[0]
    check_index("slots", slots, None)
    check_index("rows", rows, batch)
    check_index("last_correct", last_correct, batch)
    if steps_to_track is not None:
        check_index("steps_to_track", steps_to_track, batch)
    _check_int32("current_input", current_input, None)
    _check_int32("row_slot", row_slot, current_input.shape[0])
    _check_int32("slot_row", slot_row, None)
    _check_int32("track_src", track_src, None)
    if batch > track_src.shape[0]:
        raise ValueError(f"batch {batch} exceeds the {track_src.shape[0]} entries of track_src")
    _check_region(first_draft_slot, nodes_per_row)
    check_same_device(
        current_input=current_input,
        row_slot=row_slot,
        slot_row=slot_row,
        slots=slots,
        rows=rows,
        last_correct=last_correct,
        steps_to_track=steps_to_track,
        track_src=track_src,
    )
    if batch == 0:
        return
    _commit_slots_kernel[(triton.cdiv(batch, BLOCK),)](
        current_input,
        row_slot,
        slot_row,
        slots,
        rows,
        last_correct,
        steps_to_track,
        track_src,
        first_draft_slot,
        nodes_per_row,
        batch,
        HAS_TRACK=steps_to_track is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def newest_slots(
    newest: torch.Tensor,
    *,
    slots: torch.Tensor,
    current_input: torch.Tensor,
    row_slot: torch.Tensor,
    slot_row: torch.Tensor,
) -> None:
    """Where the newest state of each canonical slot lies: in a draft slot or in the slot itself.

    newest    [>=B] int32, first B written; 0 where slot <= 0.
    slots     [B] int32 or int64.
    current_input, row_slot [R] int32, slot_row [S] int32: read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch = slots.shape[0]
    _check_books(slots, current_input, row_slot, slot_row)
    _check_int32("newest", newest, None)
    if batch > newest.shape[0]:
        raise ValueError(f"batch {batch} exceeds the {newest.shape[0]} entries of newest")
    check_same_device(newest=newest, slots=slots)
    if batch:
        _newest_slots_kernel[(triton.cdiv(batch, BLOCK),)](
            newest, slots, current_input, row_slot, slot_row, batch, BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def forget_inputs(
    *, slots: torch.Tensor, current_input: torch.Tensor, row_slot: torch.Tensor, slot_row: torch.Tensor
) -> None:
    """Make the canonical slots the newest again: current_input -1 in the rows that serve them.

    slots     [B] int32 or int64; <= 0 is skipped. A row that serves another slot by now is left alone.
    current_input [R] int32 is written; row_slot [R] and slot_row [S] int32 are read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    _check_books(slots, current_input, row_slot, slot_row)
    batch = slots.shape[0]
    if batch:
        _forget_inputs_kernel[(triton.cdiv(batch, BLOCK),)](
            slots, current_input, row_slot, slot_row, batch, BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def _check_int32(name: str, tensor: torch.Tensor, length: int | None) -> None:
    check_index(name, tensor, length)
    check_dtype(name, tensor, (torch.int32,))


def _check_region(first_draft_slot: int, nodes_per_row: int) -> None:
    if first_draft_slot <= 0 or nodes_per_row <= 0:
        raise ValueError(f"first_draft_slot {first_draft_slot}, nodes_per_row {nodes_per_row}: expected both > 0")


def _check_books(
    slots: torch.Tensor, current_input: torch.Tensor, row_slot: torch.Tensor, slot_row: torch.Tensor
) -> None:
    check_index("slots", slots, None)
    _check_int32("current_input", current_input, None)
    _check_int32("row_slot", row_slot, current_input.shape[0])
    _check_int32("slot_row", slot_row, None)
    check_same_device(slots=slots, current_input=current_input, row_slot=row_slot, slot_row=slot_row)
