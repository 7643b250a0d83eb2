"""What goes wrong in one request stays there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from . import scenarios
from .harness import compare_states, plain_spec, run, token_differences
from .matrix import FAMILIES, FEW_SLOTS, IN_FULL, Case, in_modes
from .sabotage import POISON
from .scenario import Request, Scenario
from .spec import EngineSpec, Result
from .states import as_tokens

CACHES = {"gdn": "extra_buffer-overlap", "mamba2": "no_buffer"}


def _poisoned(vocab: int) -> Scenario:
    """Two requests with `POISON`, in a prompt's middle and at its end, beside, before and after others.

    No other prompt begins as theirs do: what is cached of them is as wrong as they are. Within a chunk of a prefill NaN
    reaches the tokens before it too, with any kernel that masks by a product with zero, and SGLang caches those tokens.
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


_plain: dict[tuple[str, str], Result] = {}


def _without_faults(spec: EngineSpec) -> Result:
    """What a plain engine does with the scenario. One run for all engines of a family."""
    plain = dataclasses.replace(plain_spec(spec), sabotage="mute", record_live=False)
    key = plain.model, plain.key()
    if key not in _plain:
        _plain[key] = run(plain, [_poisoned(POISON)])
    return _plain[key]


def _sabotaged(sabotage: str, family: str, mode: str, checkpoint: Callable[[str], str]) -> Result:
    """The scenario on an engine with few slots. Everything but the poisoned must be what a plain engine has of it."""
    cache = CACHES[family]
    spec = Case(family, "nextn-tree", cache, mode).spec(checkpoint(family), sabotage=sabotage, **FEW_SLOTS[cache])
    result = run(spec, [_poisoned(POISON)])
    rest = _without_the_poisoned(result)
    assert len(rest.outcomes) == len(result.outcomes) - 2
    assert token_differences(rest, _without_the_poisoned(_without_faults(spec))) == []
    compare_states(rest).check()
    return result


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), in_modes(IN_FULL, FAMILIES))
def test_not_a_number_reaches_no_other_request(family, mode, checkpoint):
    """Not through a batch, nor a slot, a window or a token of the KV cache that is used again."""
    result = _sabotaged("poison", family, mode, checkpoint)
    poisoned = [record for record in result.records if POISON in as_tokens(record.prefix)]
    assert any(not torch.isfinite(record.state.temporal).all() for record in poisoned), "nothing was poisoned"


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), in_modes(IN_FULL, FAMILIES))
def test_a_malformed_tree_reaches_no_other_request(family, mode, checkpoint):
    """Its own answer is wrong, as its tree is, and it ends all the same."""
    result = _sabotaged("scramble", family, mode, checkpoint)
    plain = _without_faults(result.spec)
    bad = [key for key, outcome in result.outcomes.items() if POISON in outcome.prompt]
    said, wanted = ([each.outcomes[key].tokens for key in bad] for each in (result, plain))
    assert said != wanted, "no tree was bad"
    assert [len(tokens) for tokens in said] == [len(tokens) for tokens in wanted]
