"""Requests that start at once do not go on to fold at once, unless nothing is left to chance."""

from __future__ import annotations

import statistics

import pytest

fold_phases = pytest.importorskip("fold_phases")

ROWS, STEPS = 64, 60


@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("accept", [0.7, 0.9])
def test_steps_become_even(nodes, accept):
    last = fold_phases.folds_by_step(nodes, accept, rows=ROWS, steps=STEPS, runs=50)[-10:]
    means = [statistics.mean(of_step) for of_step in last]
    assert max(means) < 1.2 * min(means)
    assert max(map(max, last)) < 0.7 * ROWS


def test_without_chance_all_rows_fold_at_once():
    counted = fold_phases.folds_by_step(4, 1.0, rows=ROWS, steps=STEPS, runs=1)
    assert {of_step[0] for of_step in counted} == {0, ROWS}
