"""What goes wrong in one request stays there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from . import scenarios
from .harness import compare_states, plain_spec, run, token_differences
from .matrix import FAMILIES, FEW_SLOTS, IN_FULL, Case, in_modes
from .sabotage import POISON
from .scenario import Request, Scenario
from .spec import Result
from .states import as_tokens

CACHES = {"gdn": "extra_buffer-overlap", "mamba2": "no_buffer"}


def _poisoned(vocab: int) -> Scenario:
    """Two requests that turn into NaN, in a prompt's middle and at its end, beside, before and after others.

    No other prompt begins as theirs do: within a chunk of a prefill NaN reaches the tokens before it, with any kernel
    that masks by a product with zero, and SGLang caches those tokens.
    """
    bad = scenarios.tokens(400, 40, vocab)
    requests = [Request(f"before{i}", scenarios.repetitive(410 + i, 30 + 9 * i, vocab), 30) for i in range(2)]
    requests += [
        Request("bad1", (*bad[:20], POISON, *bad[20:]), 24, at_step=2),
        Request("bad2", (*bad, POISON), 24, at_step=4),
        Request("beside", scenarios.tokens(401, 70, vocab), 24, at_step=3),
    ]
    for i in range(8):  # more than there are slots: those that held NaN are taken again
        prompt = scenarios.repetitive(420 + i, 20 + 11 * i, vocab)
        requests.append(Request(f"after{i}", prompt, 20, after="bad1" if i % 2 else "bad2"))
        requests.append(Request(f"next{i}", scenarios.tokens(430 + i, 4, vocab), 12, continues=f"after{i}"))
    return Scenario("poisoned", tuple(requests))


def _without_the_poisoned(result: Result) -> Result:
    outcomes = {key: outcome for key, outcome in result.outcomes.items() if POISON not in outcome.prompt}
    records = [record for record in result.records if POISON not in as_tokens(record.prefix)]
    return dataclasses.replace(result, outcomes=outcomes, records=records)


@pytest.mark.parametrize(("family", "mode"), in_modes(IN_FULL, FAMILIES))
def test_not_a_number_reaches_no_other_request(family, mode, checkpoint):
    """Not through a batch, nor a slot, a window or a token of the KV cache that is used again."""
    todo = [_poisoned(POISON)]
    cache = CACHES[family]
    case = Case(family, "nextn-tree", cache, mode)
    result = run(case.spec(checkpoint(family), sabotage="poison", **FEW_SLOTS[cache]), todo)
    poisoned = [record for record in result.records if POISON in as_tokens(record.prefix)]
    assert any(not torch.isfinite(record.state.temporal).all() for record in poisoned), "nothing was poisoned"
    rest = _without_the_poisoned(result)
    assert len(rest.outcomes) == len(result.outcomes) - 2
    plain = run(dataclasses.replace(plain_spec(result.spec), sabotage="mute", record_live=False), todo)
    assert token_differences(rest, _without_the_poisoned(plain)) == []
    compare_states(rest).check()
