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


@pytest.mark.in_turn
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


def _cut_short(vocab: int) -> Scenario:
    """Answers of every length up to two drafts, so that most end inside an accepted run, and a turn after each. Only an
    answer's own turn may find it (``salt``)."""
    prompt = scenarios.repetitive(40, 40, vocab)
    answers = [Request(f"answer{n}", prompt, max_new_tokens=n, salt=str(n)) for n in range(2, 12)]
    turns = [
        Request(f"turn{n}", scenarios.tokens(80 + n, 5, vocab), continues=f"answer{n}", salt=str(n))
        for n in range(2, 12)
    ]
    return Scenario("cut short", (*answers, *turns))


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_ends_inside_an_accepted_run_is_found_too(family, checkpoint):
    """SGLang has verified more tokens than the answer is given; the state is brought back to those that it is."""
    todo = [_cut_short(checkpoint.vocab)]
    result = run(Case(family, "nextn-chain", "rewind", "replay").spec(checkpoint(family)), todo)
    check_equal(result, todo)
    found = {name.removeprefix("cut short/"): outcome for name, outcome in result.outcomes.items()}
    answers = {n: found[f"answer{n}"] for n in range(2, 12)}
    verified = {n: 1 + each.verify_steps + each.accepted_drafts for n, each in answers.items()}
    assert sum(verified[n] > len(each.tokens) for n, each in answers.items()) >= 2, verified
    for n, each in answers.items():
        whole = len(each.prompt) + len(each.tokens)
        assert whole - 1 <= found[f"turn{n}"].cached_tokens <= whole, n


def _one_token_each(vocab: int) -> Scenario:
    """Requests with a prefix in common, one after the other, that end with their prefill; and one that decodes."""
    shared = scenarios.tokens(31, 150, vocab)
    one, two, three = (shared + scenarios.tokens(32 + i, 40 + i, vocab) for i in range(3))
    return Scenario(
        "one token each",
        (
            Request("one", one, max_new_tokens=1),
            Request("two", two, max_new_tokens=1, after="one"),
            Request("three", three, max_new_tokens=1, after="two"),
            Request("again", three, max_new_tokens=24, after="three"),
        ),
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_what_ends_with_its_prefill_leaves_its_snapshot_too(family, checkpoint):
    """The third finds the prefix that the second branched off at, as under SGLang's own strategy."""
    todo = [_one_token_each(checkpoint.vocab)]

    def cached(cache: str) -> list[int]:
        case = Case(family, "nextn-tree", cache, "replay")
        result = run(case.spec(checkpoint(family), chunked_prefill_size=4096), todo)
        check_equal(result, todo)
        return [result.outcomes[f"one token each/{name}"].cached_tokens for name in ("two", "three", "again")]

    ours, sglangs = cached("rewind"), cached("extra_buffer-overlap")
    assert sglangs[1] >= 128
    assert all(mine >= theirs for mine, theirs in zip(ours, sglangs, strict=True)), (ours, sglangs)


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
