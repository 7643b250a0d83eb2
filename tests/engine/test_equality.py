"""Level 3 of testing.md: with speculation, tokens and pool states equal those of a plain engine without any cache."""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import FAST_FEW_SLOTS, FEW_SLOTS, Case, cases


@pytest.mark.parametrize("case", cases())
def test_speculation_changes_nothing(case: Case, checkpoint):
    """Prefix hits, chunked prefill, staggered arrivals, limits and stops inside accepted runs, aborts, a flush."""
    todo = scenarios.common(checkpoint.vocab)
    result = run(case.spec(checkpoint(case.family)), todo)
    check_equal(result, todo)
    follow_ups = [result.outcomes[f"turns+shared/turns/{rid}"].cached_tokens for rid in ("a2", "a3", "again")]
    assert min(follow_ups) > 0, f"no prefix hits in {follow_ups}: the radix cache was not exercised"
    kinds = {record.kind for record in result.records}
    assert {"prefill", "decode", "insert", "radix"} <= kinds, f"states seen only of kinds {kinds}"


@pytest.mark.parametrize("case", cases(FAST_FEW_SLOTS))
def test_few_slots(case: Case, checkpoint):
    """The same when requests are retracted and cached states evicted all the time."""
    todo = [scenarios.pressure(checkpoint.vocab)]
    result = run(case.spec(checkpoint(case.family), **FEW_SLOTS[case.cache]), todo)
    check_equal(result, todo)
    assert sum(outcome.retractions for outcome in result.outcomes.values()) > 0, "nothing was retracted"
