"""A busy server with few slots: nothing stale is served, nothing is lost."""

from __future__ import annotations

import pytest

from . import stress
from .harness import check_equal, run
from .matrix import FAMILIES, FEW_SLOTS, IN_FULL, Case, caches
from .spec import Result

CASES = {
    "gdn": Case("gdn", "nextn-tree", "extra_buffer-overlap", "replay"),
    "mamba2": Case("mamba2", "ngram-tree", "no_buffer", "replay"),
}
REWOUND = Case("gdn", "nextn-tree", "rewind", "replay")
LONG = 1200
"""Requests of the slow runs."""


def _check(result: Result, todo: list) -> None:
    """That answers and states are right, and that the run met what it is for."""
    check_equal(result, todo)
    outcomes = result.outcomes.values()
    assert sum(outcome.retractions for outcome in outcomes) > 0, "nothing was retracted"
    assert sum(outcome.aborted for outcome in outcomes) > 0, "nothing was aborted"
    assert result.cached_tokens > 0, "the radix cache was not exercised"
    assert {"length", "stop", "abort"} <= {outcome.finish for outcome in outcomes}


@pytest.mark.parametrize("case", [*CASES.values(), REWOUND], ids=lambda case: case.name)
def test_answers_under_load_are_those_without_speculation(case, checkpoint):
    todo = stress.waves(1, 60, checkpoint.vocab, size=30)
    _check(run(case.spec(checkpoint(case.family), **FEW_SLOTS[case.cache]), todo), todo)


@pytest.mark.once
@pytest.mark.parametrize(("family", "fault"), [("gdn", "track_root"), ("mamba2", "skip_settle")])
def test_a_fault_does_not_survive_it(family, fault, checkpoint):
    case = CASES[family]
    todo = stress.waves(1, 60, checkpoint.vocab, size=30)
    with pytest.raises(AssertionError):
        check_equal(run(case.spec(checkpoint(family), sabotage=fault, **FEW_SLOTS[case.cache]), todo), todo)


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "mode"), [(cache, mode) for mode in IN_FULL for cache in caches(mode)])
@pytest.mark.parametrize("family", FAMILIES)
def test_for_long(family, cache, mode, checkpoint):
    """States are compared where the radix cache is handed them; those of running requests are the short run's."""
    case = Case(family, CASES[family].algorithm, cache, mode)
    todo = stress.waves(2, LONG, checkpoint.vocab)
    changes = {**FEW_SLOTS[cache], "record_live": False, "timeout": 3600.0, "max_steps": 200_000}
    _check(run(case.spec(checkpoint(family), **changes), todo), todo)
