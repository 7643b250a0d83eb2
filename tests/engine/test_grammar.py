"""Constrained answers under speculation that end inside accepted runs, and follow-ups on their cached states."""

from __future__ import annotations

import itertools

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import ENGINE, EVERYWHERE, FAMILY_MODES, IN_FULL, Case, caches, marks
from .scenario import Request, Scenario

OWN = [(family, mode) for family, mode in FAMILY_MODES if mode in IN_FULL]

CELLS = (
    ("ngram-tree", "no_buffer"),
    ("ngram-tree", "extra_buffer"),
    ("ngram-tree", "extra_buffer-overlap"),
    ("nextn-tree", "extra_buffer_lazy"),
    ("ngram-tree", "rewind"),
)


def _cases() -> list:
    params = []
    for (family, mode), (algorithm, cache) in itertools.product(FAMILY_MODES, CELLS):
        case = Case(family, algorithm, cache, mode)
        if cache in caches(mode):
            params.append(pytest.param(case, id=case.name, marks=marks(mode, mode in IN_FULL)))
    return params


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _cases())
def test_grammar(case: Case, checkpoint):
    todo = [scenarios.grammars(checkpoint.vocab)]
    check_equal(run(case.spec(checkpoint(case.family)), todo), todo)


def _in_full(algorithm: str, *among: str) -> list:
    cells = [Case(family, algorithm, cache, mode) for family, mode in OWN for cache in among if cache in caches(mode)]
    return [pytest.param(case, id=case.name, marks=marks(case.mode)) for case in cells]


def _around_a_boundary() -> list:
    """Both strategies in the variant that runs everywhere, one a family in the other."""
    other = {"gdn": "extra_buffer", "mamba2": "extra_buffer-overlap"}
    cells = itertools.product(OWN, ("extra_buffer", "extra_buffer-overlap"))
    return [
        pytest.param(case, id=case.name, marks=marks(mode, mode == EVERYWHERE or cache == other[family]))
        for (family, mode), cache in cells
        for case in [Case(family, "ngram-tree", cache, mode)]
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _around_a_boundary())
def test_grammar_that_ends_around_a_boundary(case: Case, checkpoint):
    """One track slot and two: no snapshot of tokens past the end, nor an old one under a newer key."""
    todo = [scenarios.beside(*(scenarios.grammar_ends(checkpoint.vocab, length) for length in (27, 29, 33)))]
    check_equal(run(case.spec(checkpoint(case.family), extra=ENGINE[case.family].get("extra", {})), todo), todo)


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _in_full("ngram-tree", "extra_buffer-overlap", "rewind"))
def test_request_that_ends_before_its_last_verify(case: Case, checkpoint):
    """Neither its snapshot slots nor its own slot are its own any more when it is verified once more."""
    todo = [scenarios.ends_beside_a_grammar(checkpoint.vocab)]
    check_equal(run(case.spec(checkpoint(case.family)), todo), todo)


@pytest.mark.parametrize("cache", ["no_buffer", "extra_buffer"])
def test_key_that_ends_with_the_prompt(cache: str, checkpoint):
    """``--strip-thinking-cache``: a snapshot within the answer is no state of the prompt."""
    prompt = scenarios.tokens(1, 30, checkpoint.vocab)
    follow = prompt + scenarios.tokens(2, 5, checkpoint.vocab)
    todo = [Scenario("strip", (Request("a", prompt, 40), Request("b", follow, 12, after="a")))]
    case = Case("gdn", "ngram-tree", cache, "replay")
    spec = case.spec(checkpoint("gdn"), extra={"strip_thinking_cache": True}, sabotage="reasons")
    check_equal(run(spec, todo), todo)
