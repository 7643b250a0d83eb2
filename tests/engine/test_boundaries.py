"""Prompts around the boundaries of prefill chunks and track intervals, under every radix strategy."""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import CACHES, FAMILIES, FEW_SLOTS, IN_FULL, Case, in_modes


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "cache", "mode"), in_modes(IN_FULL, FAMILIES, CACHES))
def test_boundaries(family, cache, mode, checkpoint):
    case = Case(family, "ngram-tree", cache, mode)
    todo = [scenarios.boundaries(checkpoint.vocab)]
    check_equal(run(case.spec(checkpoint(case.family)), todo), todo)


@pytest.mark.parametrize("mode", in_modes(IN_FULL))
def test_lazy_without_a_free_slot(mode, checkpoint):
    """Snapshots every 16 tokens in prefill and decode, and no second slot for them."""
    todo = [scenarios.boundaries(checkpoint.vocab)]
    case = Case("mamba2", "ngram-tree", "extra_buffer_lazy", mode)
    small = {name: x for name, x in FEW_SLOTS[case.cache].items() if name != "retract_every"}
    result = run(case.spec(checkpoint(case.family), **small), todo)
    check_equal(result, todo)
