"""Requests above temperature 0: states are those of the tokens that were drawn.

On a CPU SGLang draws the token of a prefill and of a plain decode, and verifies greedily at any temperature: rejection
sampling is a kernel of the GPU's. What is drawn in a verify can be looked at there alone.
"""

from __future__ import annotations

import dataclasses

import pytest

from . import scenarios
from .harness import compare_states, run
from .matrix import FAMILIES, IN_FULL, Case
from .scenario import Request, Scenario

CELL = {"gdn": ("nextn-chain", "no_buffer"), "mamba2": ("nextn-tree", "extra_buffer-overlap")}


def _warm(vocab: int) -> Scenario:
    turns = scenarios.turns(vocab)
    return dataclasses.replace(turns, requests=tuple(dataclasses.replace(r, temperature=1.5) for r in turns.requests))


@pytest.mark.slow
@pytest.mark.parametrize("mode", IN_FULL)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_drawn_tokens(family, mode, checkpoint):
    result = run(Case(family, *CELL[family], mode).spec(checkpoint(family)), [_warm(checkpoint.vocab)])
    compare_states(result).check()
    greedy = run(dataclasses.replace(result.spec, mode="off", spec=None, radix=None), _continued(result))
    first = [len(outcome.prompt) for outcome in result.outcomes.values()]
    assert len(first) == len(greedy.outcomes) and result.accept_length > 1.05
    for key, outcome in result.outcomes.items():
        assert greedy.outcomes[f"rest/{key.partition('/')[2]}"].tokens == outcome.tokens[1:], "a verify drew a token"


def _continued(result) -> list[Scenario]:
    """What a greedy engine says after each request's first token."""
    requests = (
        Request(key.partition("/")[2], (*outcome.prompt, outcome.tokens[0]), len(outcome.tokens) - 1)
        for key, outcome in result.outcomes.items()
    )
    return [Scenario("rest", tuple(requests))]


@pytest.mark.slow
def test_a_prefill_draws(checkpoint):
    """Or the test above would say nothing of temperatures."""
    spec = Case("gdn", *CELL["gdn"], "replay").spec(checkpoint("gdn"))
    cold, warm = (run(spec, [make(checkpoint.vocab)]) for make in (scenarios.turns, _warm))
    assert cold.outcomes["turns/a1"].tokens[0] != warm.outcomes["turns/a1"].tokens[0]
