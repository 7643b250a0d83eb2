"""A step's plan: where every row of a batch stands in its window, looked up once for all layers (operands.Rows.plan),
and which rows a verify starts first.

A kernel of a layer that asked for the slot, then for what the slot has pending, then for where these tokens lie, would
wait for memory three times before its first input is on its way, in every layer anew. One program per batch row writes
down what it would find.

Schedule: rows that fold run several times as long as the others. Started last they would keep the GPU waiting with most
of it idle; started first they are covered by the short ones. Rows keep their order within both classes: a program
counts the rows that fold before its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import operands
from .arguments import Arg, check
from .dependent import has_dependent_launch, wait_then_let_go
from .grid import launch_grid
from .operands import MAX_NODES, Rows, Window, check_nodes
from .pending import pending_and_folding

OTHERS = 256  # rows that a program looks at at once
NEWEST = tl.constexpr(operands.PLAN_NEWEST)
ROOT = tl.constexpr(operands.PLAN_ROOT)


@triton.jit
def planned(plan, b, stride_plan):
    """What the plan says of batch row b: where in it the nodes' positions begin; its slot and its request row, int64;
    its pending tokens, and how many of them its verify folds."""
    at = plan + b * stride_plan
    return at + ROOT, tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _write_places(to, order_row, first, count, BLOCK: tl.constexpr, capacity, real):
    """Positions of `count` entries of the order from `first` on; 0 where there is no such entry."""
    place = tl.arange(0, BLOCK)
    entry = first + place
    there = real & (entry >= 0) & (entry < capacity) & (place < count)
    tl.store(to + place, tl.load(order_row + entry, mask=there, other=0), mask=place < count)


# by size or alignment of a batch or by draft length nothing is gained, and a server would wait for each compilation
@triton.jit(do_not_specialize=["slots", "rows", "batch", "nodes"])
def _plan_rows_kernel(
    plan,
    schedule,
    slots,
    rows,
    pending,
    newest,
    order,
    fold_threshold,
    fold_at_once,
    capacity,
    batch,
    nodes,
    stride_plan,
    STAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_STAY: tl.constexpr,
    BLOCK_B: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_then_let_go(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    real = slot > 0
    slot = tl.where(real, slot, 0)
    row = tl.load(rows + b, mask=real, other=0).to(tl.int64)
    before, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
    before = tl.where(real, before, 0)
    folding = tl.where(real, folding, 0)
    root = plan + b * stride_plan + ROOT
    tl.store(root - ROOT, slot.to(tl.int32))
    tl.store(root - ROOT + 1, row.to(tl.int32))
    tl.store(root - ROOT + 2, before)
    tl.store(root - ROOT + 3, folding)
    order_row = order + row * capacity
    _write_places(root - 2 * NEWEST, order_row, folding - NEWEST, NEWEST, NEWEST, capacity, real)
    _write_places(root - NEWEST, order_row, before - NEWEST, NEWEST, NEWEST, capacity, real)
    _write_places(root, order_row, before, nodes, BLOCK_N, capacity, real)
    _write_places(root + nodes, order_row, folding, STAY, BLOCK_STAY, capacity, real)

    if schedule is not None:
        ahead = tl.zeros((), tl.int32)
        in_all = tl.zeros((), tl.int32)
        for start in range(0, batch, BLOCK_B):
            other = start + tl.arange(0, BLOCK_B)
            other_slot = tl.load(slots + other, mask=other < batch, other=0).to(tl.int64)
            other_pending = tl.load(pending + other_slot, mask=other_slot > 0, other=0)
            first = (other_pending > fold_threshold).to(tl.int32)
            ahead += tl.sum(tl.where(other < b, first, 0), axis=0)
            in_all += tl.sum(first, axis=0)
        place = tl.where(before > fold_threshold, ahead, in_all + b.to(tl.int32) - ahead)
        tl.store(schedule + place, b.to(tl.int32))


def plan_rows(window: Window, rows: Rows, *, nodes: int) -> None:
    """Plan a verify of N = `nodes` nodes a row. One launch, no host read.

    window  pending and newest are read at the slots, order at the rows.
    rows    slots and rows are read. plan: written; schedule, where given: the batch rows 0..B-1 are written to its
            first B entries, those that the verify folds in front.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device, and without a plan.
    """
    plan = rows.plan_for(nodes, window.fold_threshold)
    batch, capacity = check(
        slots=Arg(rows.slots, "B"),
        rows=Arg(rows.rows, "B"),
        plan=Arg(plan, "B _"),
        schedule=Arg(rows.schedule, ">=B"),
        pending=Arg(window.pending, "S"),
        newest=Arg(window.newest, "S"),
        order=Arg(window.order, "R C"),
    ).get_all("B C")
    check_nodes(nodes)
    if batch == 0:
        return
    overlap = has_dependent_launch(rows.slots.device)
    _plan_rows_kernel[launch_grid(batch)](
        plan,
        rows.schedule,
        rows.slots,
        rows.rows,
        window.pending,
        window.newest,
        window.order,
        window.fold_threshold,
        window.fold_at_once,
        capacity,
        batch,
        nodes,
        plan.stride(0),
        STAY=window.fold_threshold,
        BLOCK_N=MAX_NODES,
        BLOCK_STAY=triton.next_power_of_2(max(1, window.fold_threshold)),
        BLOCK_B=OTHERS,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )
