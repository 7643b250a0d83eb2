"""One request of 8,192 generated tokens, of 32,768 on a GPU: its tokens, and its state after them.

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

from . import logprobs, rounding, scenarios
from .harness import STATE_BOUND, EngineError, plain_spec, reference_states, run, run_all
from .matrix import FAMILIES, Case
from .scenario import Request, Scenario
from .spec import EngineSpec, Result
from .states import as_tokens, relative_error

GENERATED = int(os.environ.get("LONG_ANSWER", 8_192))
ON_A_GPU = 32_768
BESIDE = 4096
"""Tokens more than the answer's that fit the model's positions and its KV cache."""

CELLS = [("replay", "rewind"), ("slots", "extra_buffer-overlap")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def patient(checkpoint, tmp_path_factory):
    """``patient(family, tokens)`` is the tiny checkpoint of a family, with positions for an answer of so many."""

    def folder(family: str, tokens: int) -> str:
        copy = tmp_path_factory.mktemp("long") / family
        shutil.copytree(checkpoint(family), copy)
        config = Path(copy, "config.json")
        positions = {"max_position_embeddings": tokens + BESIDE}
        config.write_text(json.dumps(json.loads(config.read_text()) | positions))
        return str(copy)

    return folder


def _last_error(result: Result, tokens: int) -> float:
    """Of the last state that the radix cache was given, against a prefill of its tokens."""
    last = max((r for r in result.records if r.kind == "insert"), key=lambda record: len(record.prefix))
    assert len(as_tokens(last.prefix)) > 0.9 * tokens
    return relative_error(last.state, reference_states(result.spec, [last.prefix])[last.prefix])


def _jobs(case: Case, model: str, vocab: int, tokens: int, **changes) -> list[tuple[EngineSpec, list[Scenario]]]:
    """What generates the answer: the engine under test, a plain one, and SGLang's own verify."""
    todo = [Scenario("long", (Request("r", scenarios.repetitive(1, 24, vocab), max_new_tokens=tokens),))]
    room = {"max_total_tokens": tokens + BESIDE, "max_steps": 2 * tokens, "record_live": False, "timeout": 7200.0}
    ours = case.spec(model, **room, **changes)
    stock = dataclasses.replace(case, mode="off", cache="extra_buffer-overlap").spec(model, **room, **changes)
    plain = dataclasses.replace(plain_spec(ours), record_live=False)
    return [(spec, todo) for spec in (ours, plain, stock)]


def _errors(results: list[Result], tokens: int, tie: float = 0.0) -> tuple[float, float]:
    """Ours and stock's after the answer, which is the plain engine's up to a token that led the next best by less than
    ``tie``; a state is held against a prefill of its own tokens."""
    result, plain, stock = results
    assert result.accept_length > 1.05
    (answer,) = result.outcomes.values()
    wrong, ties = rounding.token_differences(result, plain, tie)
    assert len(answer.tokens) == tokens and not wrong, wrong
    print(f"; {len(ties)} ties", end="")
    ours, theirs = _last_error(result, tokens), _last_error(stock, tokens)
    print(f"; error after {tokens} tokens {ours:.1e}, stock's {theirs:.1e}", end="")
    return ours, theirs


@pytest.mark.parametrize("mode, cache", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_long_answers_do_not_drift(family, mode, cache, patient, checkpoint):
    case = Case(family, "nextn-chain", cache, mode)
    jobs = _jobs(case, patient(family, GENERATED), checkpoint.vocab, GENERATED)
    ours, _ = _errors([run(*job) for job in jobs], GENERATED)
    assert ours < STATE_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("mode, cache", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_longer_ones_on_a_gpu_drift_no_more_than_stock(family, mode, cache, patient, checkpoint):
    """All three engines at once. Two verifies add up in other orders, hence half as much again; and among so many
    tokens there may be one that is the best by less than engines differ in."""
    case = Case(family, "nextn-chain", cache, mode)
    jobs = _jobs(case, patient(family, ON_A_GPU), checkpoint.vocab, ON_A_GPU, device="cuda")
    found = run_all(jobs, len(jobs))
    if errors := [result for result in found if isinstance(result, EngineError)]:
        raise errors[0]
    ours, theirs = _errors([result for result in found if isinstance(result, Result)], ON_A_GPU, logprobs.BOUND)
    assert ours < STATE_BOUND
    assert ours <= 1.5 * theirs
