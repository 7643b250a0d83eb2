"""N changes at run time, down to a verify of the root alone, over one pool and several backend instances."""

from __future__ import annotations

import pytest

from . import adaptive, scenarios
from .harness import check_equal, run
from .matrix import ENGINE, FAMILIES, FAMILY_MODES, FEW_SLOTS, IN_FULL, Case, in_modes, marks

CACHES = {"gdn": "extra_buffer-overlap", "mamba2": "no_buffer"}
OTHER_CACHES = {"gdn": ("no_buffer", "extra_buffer_lazy"), "mamba2": ("extra_buffer-overlap", "extra_buffer_lazy")}


def _cases() -> list:
    params = []
    for family, mode in FAMILY_MODES:
        for cache in (CACHES[family], *OTHER_CACHES[family]):
            case = Case(family, "nextn-chain", cache, mode)
            quick = mode in IN_FULL and cache == CACHES[family]
            params.append(pytest.param(case, id=case.name, marks=marks(mode, quick)))
    return params


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _cases())
def test_n_changes(case: Case, checkpoint, tmp_path):
    vocab = checkpoint.vocab
    todo = [scenarios.turns(vocab), scenarios.staggered(vocab), scenarios.limits(vocab), scenarios.aborts(vocab)]
    extra = {**ENGINE[case.family].get("extra", {}), **adaptive.settings(tmp_path)}
    result = run(case.spec(checkpoint(case.family), extra=extra), todo)
    seen = set(adaptive.node_counts(result))
    assert {1, 2, 3, 4} <= seen, f"N was switched to {seen} only"
    check_equal(result, todo)


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), in_modes(IN_FULL, FAMILIES))
def test_few_slots(family, mode, checkpoint, tmp_path):
    """The same while requests are retracted and come back with another N."""
    todo = [scenarios.pressure(checkpoint.vocab)]
    case = Case(family, "nextn-chain", "no_buffer", mode)
    extra = {**ENGINE[family].get("extra", {}), **adaptive.settings(tmp_path)}
    result = run(case.spec(checkpoint(family), extra=extra, **FEW_SLOTS[case.cache]), todo)
    assert len(set(adaptive.node_counts(result))) >= 3
    assert sum(outcome.retractions for outcome in result.outcomes.values()) > 0, "nothing was retracted"
    check_equal(result, todo)
