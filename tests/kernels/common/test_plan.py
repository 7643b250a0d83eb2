"""plan_rows: where every row of a step stands in its window, and the order in which a verify starts rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.common import ops_for
from mamba_mtp_kernels.common.operands import PLAN_NEWEST, PLAN_ROOT, Rows, Window, plan_width
from mamba_mtp_kernels.common.plan import plan_rows
from mamba_mtp_kernels.common.reference import plan_rows_reference

from ..helpers import chain_parents, random_bookkeeping, random_newest

PLANS = [pytest.param(plan_rows, id="kernel"), pytest.param(plan_rows_reference, id="reference")]
UNTOUCHED = -7


def unplanned(rows: Rows, width: int) -> Rows:
    """With a plan and a schedule of one row more than there are, to be filled."""
    plan = torch.full((rows.batch + 1, width), UNTOUCHED, dtype=torch.int32, device=rows.slots.device)
    return replace(rows, plan=plan, schedule=plan[:, 0].clone())


def bookkeeping(batch: int, nodes: int, threshold: int, device, **more):
    generator = torch.Generator().manual_seed(batch)
    pending = torch.randint(0, threshold + nodes + 1, (batch,), generator=generator).tolist()
    newest = random_newest(pending, threshold, generator) if more.pop("keeps_newest", False) else None
    given = {"parents": chain_parents(batch, nodes), "pending": pending, "fold_threshold": threshold}
    return random_bookkeeping(**given, generator=generator, newest=newest, **more).to(device)


def expected_row(books, b: int) -> list[int]:
    if books.slots[b] <= 0:
        return [0] * (PLAN_ROOT + books.nodes + books.fold_threshold)
    before, folding, row = books.pending_of(b), books.folding(b), int(books.rows[b])
    order = books.order[row].tolist()
    newest = [order[t] if t >= 0 else 0 for end in (folding, before) for t in range(end - PLAN_NEWEST, end)]
    waiting = order[folding : folding + books.fold_threshold]
    waiting += [0] * (books.fold_threshold - len(waiting))
    return [int(books.slots[b]), row, before, folding, *newest, *order[before : before + books.nodes], *waiting]


@pytest.mark.parametrize("op", PLANS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keeps_newest", [False, True])
@pytest.mark.parametrize(
    ("batch", "nodes", "threshold", "padding"),
    [(1, 4, 12, ()), (2, 1, 0, ()), (7, 5, 3, (2, 5)), (7, 8, 16, (0,)), (5, 17, 3, (4,)), (40, 4, 12, (3, 39))],
)
def test_where_rows_stand(op, index_dtype, keeps_newest, batch, nodes, threshold, padding, device):
    books = bookkeeping(
        batch, nodes, threshold, device, keeps_newest=keeps_newest, padding=padding, index_dtype=index_dtype
    )
    width = plan_width(nodes, threshold)
    rows = unplanned(books.batch_rows, width + 4)
    op(books.window(Window), rows, nodes=nodes)
    used = PLAN_ROOT + nodes + threshold
    assert used <= width
    for b in range(batch):
        assert rows.plan[b].tolist() == expected_row(books, b) + [UNTOUCHED] * (width + 4 - used), f"row {b}"
    assert set(rows.plan[batch].tolist()) == {UNTOUCHED}


@pytest.mark.parametrize("op", PLANS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [1, 2, 7, 64, 300])
def test_rows_that_fold_go_first(op, dtype, batch, device):
    padding = (batch // 2,) if batch > 1 else ()
    books = bookkeeping(batch, 4, 4, device, padding=padding, index_dtype=dtype)
    books.pending[0] = books.pending[-1] = 100  # a padding row must not fold by what slots 0 and -1 hold
    rows = unplanned(books.batch_rows, plan_width(4, 4))
    op(books.window(Window), rows, nodes=4)
    folds = [books.pending_of(b) > 4 for b in range(batch)]
    expected = [b for b in range(batch) if folds[b]] + [b for b in range(batch) if not folds[b]]
    assert rows.schedule.tolist() == [*expected, UNTOUCHED]


@pytest.mark.parametrize("op", PLANS)
def test_without_a_schedule(op, device):
    books = bookkeeping(3, 4, 4, device)
    rows = unplanned(books.batch_rows, plan_width(4, 4))
    op(books.window(Window), replace(rows, schedule=None), nodes=4)
    assert [rows.plan[b].tolist() for b in range(3)] == [expected_row(books, b) for b in range(3)]
    assert set(rows.schedule.tolist()) == {UNTOUCHED}


def test_errors_name_the_argument(device):
    books = bookkeeping(3, 4, 4, device)
    window, rows = books.window(Window), unplanned(books.batch_rows, plan_width(4, 4))
    for op in (plan_rows, plan_rows_reference):
        with pytest.raises(ValueError, match="plan: None, but an op asks for the step's plan"):
            op(window, replace(rows, plan=None), nodes=4)
        with pytest.raises(ValueError, match=r"plan: shape \(4, 20\), expected 24 numbers a row or more"):
            op(window, rows, nodes=5)
    with pytest.raises(ValueError, match=r"plan: shape \(2, 20\), expected \[B>=3, _\]"):
        replace(rows, plan=rows.plan[:2])
    with pytest.raises(ValueError, match=r"schedule: shape \(2,\), expected \[B>=3\]"):
        replace(rows, schedule=rows.schedule[:2])
    wide = unplanned(rows, plan_width(65, 4))
    with pytest.raises(ValueError, match="65 nodes, the ancestor mask holds 64"):
        plan_rows(window, wide, nodes=65)


def test_ops_for():
    assert ops_for("cpu").plan_rows is plan_rows_reference
    assert ops_for("cuda").plan_rows is plan_rows
