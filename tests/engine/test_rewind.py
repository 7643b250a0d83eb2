"""Rewinding: what a conversation's next turn finds in the radix cache."""

from __future__ import annotations

import importlib.metadata
import itertools

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import FAMILIES, Case
from .scenario import Request, Scenario

TURNS = 4


def _conversation(vocab: int, answers: int = 9) -> Scenario:
    """Each turn's prompt is the last one, its answer and a few words more; answers end by length, within accepted
    runs."""
    first = Request("turn0", scenarios.tokens(7, 41, vocab), max_new_tokens=answers)
    rest = [
        Request(f"turn{i}", scenarios.tokens(70 + i, 5, vocab), max_new_tokens=answers + i, continues=f"turn{i - 1}")
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


def _pages() -> list:
    quick = {("gdn", 16), ("mamba2", 64)}
    every = itertools.product(FAMILIES, (16, 64))
    return [pytest.param(*each, marks=() if each in quick else pytest.mark.slow) for each in every]


@pytest.mark.skipif(importlib.metadata.version("sglang") == "0.5.17", reason="its allocator of pages is a GPU kernel")
@pytest.mark.parametrize("family, page", _pages())
def test_the_next_turn_recomputes_no_whole_page(family, page, checkpoint):
    """The radix cache takes whole pages. An answer that does not reach the end of the page its prompt ends in leaves
    what the prefill left."""
    vocab = checkpoint.vocab
    todo = [_conversation(vocab, answers=70), scenarios.turns(vocab), scenarios.staggered(vocab)]
    case = Case(family, "nextn-chain", "rewind", "replay")  # on a CPU SGLang verifies trees over single tokens only
    result = run(case.spec(checkpoint(family), page_size=page, track_interval=64), todo)
    check_equal(result, todo)
    assert "radix rewind, " in result.log
    turns = [result.outcomes[f"conversation/turn{i}"] for i in range(TURNS)]
    for before, turn in itertools.pairwise(turns):
        whole = len(before.prompt) + len(before.tokens)
        assert turn.cached_tokens in {(whole - 1) // page * page, whole // page * page}
