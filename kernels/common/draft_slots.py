"""Slots mode's bookkeeping: where a request's newest state lies, in three small device arrays (operands.SlotBooks).

A request has M + 1 places for a verify of up to M + 1 nodes: place 0 is its canonical slot, places 1..M are its row r's
draft slots, first_draft_slot + r*M .. + M-1. A verify that reads the newest state from place p writes node i's to place
(p + i) mod (M + 1): the root's over the one it was read from, which nobody asks for any more. The next verify reads the
accepted node's. Rows and slots are recycled independently, so current_input[r] speaks of slot s only while
row_slot[r] == s. Each op is elementwise over the batch: one launch, no host read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import INDICES, Arg, check
from .grid import launch_grid
from .operands import Rows, SlotBooks

BLOCK = 128
NUM_WARPS = BLOCK // 32


# by size or alignment of a batch nothing is gained, and a server would wait for each compilation
@triton.jit(do_not_specialize=["slots", "rows", "total"])
def _place_nodes_kernel(
    read_slots,
    write_slots,
    slots,
    rows,
    current_input,
    row_slot,
    first_draft_slot,
    slots_per_row,
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
    newest = tl.load(current_input + row, mask=real, other=-1)
    served = tl.load(row_slot + row, mask=real, other=-1)
    before_draft_slots = first_draft_slot + row.to(tl.int32) * slots_per_row - 1
    place = node + tl.where((newest > 0) & (served == slot), newest - before_draft_slots, 0)
    place = tl.where(place > slots_per_row, place - slots_per_row - 1, place)
    write = tl.where(real, tl.where(place == 0, slot, before_draft_slots + place), 0)
    tl.store(write_slots + entry, write, mask=inside)
    tl.store(read_slots + b, write, mask=inside & (node == 0))


@triton.jit(do_not_specialize=["slots", "rows", "last_correct", "steps_to_track", "nodes", "batch"])
def _commit_slots_kernel(
    current_input,
    row_slot,
    slot_row,
    slots,
    rows,
    write_slots,
    last_correct,
    steps_to_track,
    track_src,
    nodes,
    batch,
    HAS_TRACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < batch
    slot = tl.load(slots + b, mask=inside, other=0).to(tl.int64)
    real = inside & (slot > 0)
    row = tl.load(rows + b, mask=real, other=0).to(tl.int64)
    # no node leads out of the row's own places, whatever a tree gone wrong has accepted
    last = tl.minimum(tl.load(last_correct + b, mask=real, other=-1).to(tl.int32), nodes - 1)
    accepts = real & (last >= 0)
    newest = tl.load(write_slots + b * nodes + last, mask=accepts, other=0)
    tl.store(current_input + row, tl.where(newest == slot, -1, newest), mask=accepts)
    tl.store(row_slot + row, slot.to(tl.int32), mask=accepts)
    tl.store(slot_row + slot, row.to(tl.int32), mask=accepts)
    tracked = tl.zeros((BLOCK,), tl.int32)
    if HAS_TRACK:
        step = tl.minimum(tl.load(steps_to_track + b, mask=real, other=-1).to(tl.int32), nodes - 1)
        tracked = tl.load(write_slots + b * nodes + step, mask=real & (step >= 0), other=0)
    tl.store(track_src + b, tracked, mask=inside)


@triton.jit
def _drafted(slots, current_input, row_slot, slot_row, b, inside):
    """slot, the row that last committed for it, and the draft slot of its newest state, <= 0 where there is none."""
    slot = tl.load(slots + b, mask=inside, other=0).to(tl.int64)
    row = tl.load(slot_row + slot, mask=slot > 0, other=-1).to(tl.int64)
    served = tl.load(row_slot + row, mask=row >= 0, other=-1)
    newest = tl.load(current_input + row, mask=(row >= 0) & (served == slot), other=-1)
    return slot, row, newest


@triton.jit(do_not_specialize=["slots", "batch"])
def _newest_slots_kernel(newest, slots, current_input, row_slot, slot_row, batch, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, _, drafted = _drafted(slots, current_input, row_slot, slot_row, b, b < batch)
    found = tl.where(drafted > 0, drafted, tl.maximum(slot, 0).to(tl.int32))
    tl.store(newest + b, found, mask=b < batch)


@triton.jit(do_not_specialize=["slots", "batch"])
def _forget_inputs_kernel(slots, current_input, row_slot, slot_row, batch, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, row, drafted = _drafted(slots, current_input, row_slot, slot_row, b, b < batch)
    tl.store(current_input + row, tl.full((BLOCK,), -1, tl.int32), mask=drafted > 0)


def place_nodes(read_slots: torch.Tensor, write_slots: torch.Tensor, rows: Rows, books: SlotBooks) -> None:
    """Where the coming verify of N <= M + 1 nodes reads each row's state and writes each node's.

    read_slots   [>=B] int32: first B written, slot of the row's newest state (0 for padding).
    write_slots  [>=B, N] int32, contiguous: first B rows written, the nodes' slots (0 for padding): the root's is the
                 one that is read.
    rows         slots and rows are read, the row of padding is not.
    books        current_input and row_slot are read at the rows.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        slots=Arg(rows.slots, "B"),
        current_input=Arg(books.current_input, "R"),
        read_slots=Arg(read_slots, ">=B", torch.int32),
        write_slots=Arg(write_slots, ">=B N", torch.int32, contiguous=2),
    )
    batch, nodes = sizes.get_all("B N")
    if nodes > books.slots_per_row + 1:
        raise ValueError(f"write_slots: {nodes} nodes, a request row owns {books.slots_per_row} draft slots")
    if batch == 0 or nodes == 0:
        return
    _place_nodes_kernel[launch_grid(triton.cdiv(batch * nodes, BLOCK))](
        read_slots,
        write_slots,
        rows.slots,
        rows.rows,
        books.current_input,
        books.row_slot,
        books.first_draft_slot,
        books.slots_per_row,
        batch * nodes,
        N=nodes,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def commit_slots(
    books: SlotBooks,
    rows: Rows,
    *,
    write_slots: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    track_src: torch.Tensor,
) -> None:
    """Make the last accepted node's slot the input of each row's next verify.

    books           current_input and row_slot are written at the rows, slot_row at the slots.
    rows            slots and rows are read; of padding only track_src is written.
    write_slots     [>=B, N] int32, contiguous: read, as place_nodes left them for this verify.
    last_correct    [B] int32 or int64: read, last accepted node of each row; < 0 leaves the row as it is.
    steps_to_track  [B] int32 or int64: read, node whose state is tracked; < 0: none. None: no row is tracked.
                    Of either, a node past the last counts as the last.
    track_src       [>=B] int32: first B written, slot of the tracked node, or 0.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch, nodes = check(
        slots=Arg(rows.slots, "B"),
        current_input=Arg(books.current_input, "R"),
        write_slots=Arg(write_slots, ">=B N", torch.int32, contiguous=2),
        last_correct=Arg(last_correct, "B", INDICES),
        steps_to_track=Arg(steps_to_track, "B", INDICES),
        track_src=Arg(track_src, ">=B", torch.int32),
    ).get_all("B N")
    if batch == 0 or nodes == 0:
        return
    _commit_slots_kernel[launch_grid(triton.cdiv(batch, BLOCK))](
        books.current_input,
        books.row_slot,
        books.slot_row,
        rows.slots,
        rows.rows,
        write_slots,
        last_correct,
        steps_to_track,
        track_src,
        nodes,
        batch,
        HAS_TRACK=steps_to_track is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def newest_slots(newest: torch.Tensor, books: SlotBooks, *, slots: torch.Tensor) -> None:
    """Where the newest state of each canonical slot lies: in a draft slot or in the slot itself.

    newest  [>=B] int32: first B written; 0 where the slot is <= 0.
    books   read.
    slots   [B] int32 or int64: read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    (batch,) = check(
        slots=Arg(slots, "B", INDICES), slot_row=Arg(books.slot_row, "S"), newest=Arg(newest, ">=B", torch.int32)
    ).get_all("B")
    if batch:
        _newest_slots_kernel[launch_grid(triton.cdiv(batch, BLOCK))](
            newest, slots, books.current_input, books.row_slot, books.slot_row, batch, BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def forget_inputs(books: SlotBooks, *, slots: torch.Tensor) -> None:
    """Make the canonical slots the newest again: current_input -1 in the rows that serve them.

    books  current_input is written, the others are read. A row that serves another slot by now is left alone.
    slots  [B] int32 or int64: read; <= 0 is skipped.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    (batch,) = check(slots=Arg(slots, "B", INDICES), slot_row=Arg(books.slot_row, "S")).get_all("B")
    if batch:
        _forget_inputs_kernel[launch_grid(triton.cdiv(batch, BLOCK))](
            slots, books.current_input, books.row_slot, books.slot_row, batch, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
