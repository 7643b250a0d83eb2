"""NGRAM at breadth 1 still drafts branches; stock SGLang then verifies a tree as a chain and is silently wrong."""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import baseline, check_equal, compare_states, run, token_differences
from .matrix import FAMILIES, FAST, IN_FULL, MODES, Case, in_modes


def _scenarios(checkpoint):
    vocab = checkpoint.vocab
    return [scenarios.shared(vocab), scenarios.limits(vocab), scenarios.stops(vocab), scenarios.aborts(vocab)]


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_is_wrong(family, checkpoint):
    """If this fails, SGLang has fixed it: drop our fix for that version."""
    todo = _scenarios(checkpoint)
    result = run(Case(family, "ngram-chain", "no_buffer", "off").spec(checkpoint(family)), todo)
    assert token_differences(result, baseline(result.spec, todo)), "stock gave the right tokens"
    assert compare_states(result).bad, "stock gave the right states"


def _not_in_the_matrix() -> list:
    """Where `test_equality` does not run the same engine over these scenarios and more. Breadth is no matter of a
    state's layout: one of each mode."""
    there = {family for family, algorithm, cache in FAST if (algorithm, cache) == ("ngram-chain", "no_buffer")}
    found = []
    for family in FAMILIES:
        covered = IN_FULL if family in there else ()
        modes = [mode for mode in MODES[family] if mode not in covered and not mode.endswith("-kv")]
        found += in_modes(modes, [family])
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), _not_in_the_matrix())
def test_plugin_is_right(family, mode, checkpoint):
    todo = _scenarios(checkpoint)
    check_equal(run(Case(family, "ngram-chain", "no_buffer", mode).spec(checkpoint(family)), todo), todo)
