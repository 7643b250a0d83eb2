"""Rewinding: what a conversation's next turn finds in the radix cache."""

from __future__ import annotations

import itertools

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import FAMILIES, Case
from .scenario import Request, Scenario

TURNS = 4


def _conversation(vocab: int) -> Scenario:
    """Each turn's prompt is the last one, its answer and a few words more; answers end by length, within accepted
    runs."""
    first = Request("turn0", scenarios.tokens(7, 41, vocab), max_new_tokens=9)
    rest = [
        Request(f"turn{i}", scenarios.tokens(70 + i, 5, vocab), max_new_tokens=9 + i, continues=f"turn{i - 1}")
        for i in range(1, TURNS)
    ]
    return Scenario("conversation", (first, *rest))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_recomputes_nothing(family, checkpoint):
    """A turn finds all of the turn before; but the last token of its answer only where it was accepted, not drawn after
    the last verify: nobody has computed on that one."""
    todo = [_conversation(checkpoint.vocab)]
    result = run(Case(family, "nextn-tree", "rewind", "replay").spec(checkpoint(family)), todo)
    check_equal(result, todo)
    turns = [result.outcomes[f"conversation/turn{i}"] for i in range(TURNS)]
    for before, turn in itertools.pairwise(turns):
        whole = len(before.prompt) + len(before.tokens)
        assert whole - 1 <= turn.cached_tokens <= whole
