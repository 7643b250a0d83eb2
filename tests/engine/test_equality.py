"""Level 3 of testing.md: with speculation, tokens and pool states equal those of a plain engine without any cache."""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import Case, cases


@pytest.mark.parametrize("case", cases())
def test_speculation_changes_nothing(case: Case, checkpoint):
    """Prefix hits, chunked prefill, staggered arrivals, limits and stops inside accepted runs, aborts, a flush."""
    todo = scenarios.common(checkpoint.vocab)
    result = run(case.spec(checkpoint(case.family)), todo)
    check_equal(result, todo)
    follow_ups = [result.outcomes[f"turns/{rid}"].cached_tokens for rid in ("a2", "a3", "again")]
    assert min(follow_ups) > 0, f"no prefix hits in {follow_ups}: the radix cache was not exercised"
    kinds = {record.kind for record in result.records}
    assert {"prefill", "decode", "insert", "radix"} <= kinds, f"states seen only of kinds {kinds}"


@pytest.mark.parametrize("case", cases())
def test_few_slots(case: Case, checkpoint):
    """The same when requests are retracted and cached states evicted all the time."""
    todo = [scenarios.pressure(checkpoint.vocab)]
    per_request = 1 if case.cache == "no_buffer" else 3
    small = {"max_running_requests": 4, "max_mamba_cache_size": 4 * per_request + 5, "retract_every": 7}
    result = run(case.spec(checkpoint(case.family), **small), todo)
    check_equal(result, todo)
    assert sum(outcome.retractions for outcome in result.outcomes.values()) > 0, "nothing was retracted"
