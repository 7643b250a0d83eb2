"""Requests that start at once do not go on to fold at once, unless nothing is left to chance."""

from __future__ import annotations

import pytest

fold_phases = pytest.importorskip("fold_phases")

ROWS, STEPS = 64, 60


@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("accept", [0.7, 0.9])
def test_steps_become_even(nodes, accept):
    last = fold_phases.folds_by_step(nodes, accept, rows=ROWS, steps=STEPS, runs=50)[-10:]
    means = last.double().mean(1)
    assert means.max() < 1.2 * means.min()
    assert last.max() < 0.7 * ROWS


def test_without_chance_all_rows_fold_at_once():
    counted = fold_phases.folds_by_step(4, 1.0, rows=ROWS, steps=STEPS, runs=1)
    assert set(counted.flatten().tolist()) == {0, ROWS}
