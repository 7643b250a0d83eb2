"""One request of 8,192 generated tokens: its tokens, and its state after them.

What is folded thousands of times into one slot may drift. So may what SGLang's verify leaves there: both are held
against a prefill of the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from . import scenarios
from .harness import STATE_BOUND, plain_spec, reference_states, run
from .matrix import FAMILIES, Case
from .scenario import Request, Scenario
from .spec import Result
from .states import as_tokens, relative_error

GENERATED = int(os.environ.get("LONG_ANSWER", 8_192))
ROOM = GENERATED + 4096
"""Tokens that fit the model's positions and its KV cache."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def patient(checkpoint, tmp_path_factory):
    """The tiny checkpoint of a family, with positions for a long answer."""

    def folder(family: str) -> str:
        copy = tmp_path_factory.mktemp("long") / family
        shutil.copytree(checkpoint(family), copy)
        config = Path(copy, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": ROOM}))
        return str(copy)

    return folder


def _last_error(result: Result) -> float:
    """Of the last state that the radix cache was given, against a prefill of its tokens."""
    last = max((r for r in result.records if r.kind == "insert"), key=lambda record: len(record.prefix))
    assert len(as_tokens(last.prefix)) > 0.9 * GENERATED
    return relative_error(last.state, reference_states(result.spec, [last.prefix])[last.prefix])


@pytest.mark.parametrize("mode, cache", [("replay", "rewind"), ("slots", "extra_buffer-overlap")])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_answers_do_not_drift(family, mode, cache, patient, checkpoint):
    prompt = scenarios.repetitive(1, 24, checkpoint.vocab)
    todo = [Scenario("long", (Request("r", prompt, max_new_tokens=GENERATED),))]
    case = Case(family, "nextn-chain", cache, mode)
    room = {"max_total_tokens": ROOM, "max_steps": 2 * GENERATED, "record_live": False, "timeout": 7200.0}
    spec = case.spec(patient(family), **room)
    result, plain = run(spec, todo), run(dataclasses.replace(plain_spec(spec), record_live=False), todo)
    assert result.accept_length > 1.05
    (answer,), (wanted,) = result.outcomes.values(), plain.outcomes.values()
    assert len(answer.tokens) == GENERATED and answer.tokens == wanted.tokens

    stock = dataclasses.replace(case, mode="off", cache="extra_buffer-overlap").spec(spec.model, **room)
    ours, theirs = _last_error(result), _last_error(run(stock, todo))
    print(f"; error after {GENERATED} tokens {ours:.1e}, stock's {theirs:.1e}", end="")
    assert ours < STATE_BOUND
