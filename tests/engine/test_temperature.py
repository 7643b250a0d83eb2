"""Requests above temperature 0: states are those of the tokens that were drawn.

On a CPU SGLang draws the token of a prefill and of a plain decode, and verifies greedily at any temperature: rejection
sampling is a kernel of the GPU's. What is drawn in a verify can be looked at there alone (test_gpu_features.py).
"""

from __future__ import annotations

import dataclasses

import pytest

from . import scenarios
from .harness import compare_states, run
from .matrix import FAMILIES, IN_FULL, Case
from .sampling import drawn_otherwise
from .scenario import Request, Scenario

CELL = {"gdn": ("nextn-chain", "no_buffer"), "mamba2": ("nextn-tree", "extra_buffer-overlap")}


@pytest.mark.slow
@pytest.mark.parametrize("mode", IN_FULL)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_drawn_tokens(family, mode, checkpoint):
    result = run(Case(family, *CELL[family], mode).spec(checkpoint(family)), [scenarios.drawn(checkpoint.vocab)])
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
    cold, warm = (run(spec, [make(checkpoint.vocab)]) for make in (scenarios.turns, scenarios.drawn))
    assert cold.outcomes["turns/a1"].tokens[0] != warm.outcomes["drawn/a1"].tokens[0]


@pytest.mark.slow
def test_with_seeds_draws_hang_on_the_request_alone(checkpoint):
    """In whatever batches, and whoever verifies: what the GPU's test of sampling rests on."""
    ours = Case("gdn", *CELL["gdn"], "replay").spec(checkpoint("gdn"), seeded=True)
    others = dataclasses.replace(ours, mode="off", max_running_requests=2, chunked_prefill_size=128)
    unseeded = dataclasses.replace(ours, seeded=False)
    first, again, otherwise = (run(spec, [scenarios.drawn(checkpoint.vocab)]) for spec in (ours, others, unseeded))
    assert drawn_otherwise(first, again) == []
    assert "drawn/a1" in drawn_otherwise(first, otherwise), "nothing was drawn"
