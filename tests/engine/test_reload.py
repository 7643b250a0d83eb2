"""Weights loaded into a running server: it serves as one that was started with them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from . import scenarios
from .harness import check_equal, part, run
from .matrix import FAMILIES, IN_FULL, Case, marks
from .scenario import Scenario
from .spec import EngineSpec

CELL = {"gdn": ("nextn-tree", "rewind"), "mamba2": ("nextn-chain", "extra_buffer-overlap")}
"""Drafts of a model: 0.5.17 ends where NGRAM is told to load weights, which it has none of."""


def _few_turns(vocab: int) -> Scenario:
    turns = scenarios.turns(vocab)
    return dataclasses.replace(turns, requests=turns.requests[:3])


def _cells() -> list:
    every = itertools.product(FAMILIES, IN_FULL)
    return [pytest.param(*each, marks=marks(each[1], quick=each[1] == "replay")) for each in every]


def _check(spec: EngineSpec, vocab: int, other: str) -> None:
    """The same conversations with the first weights, with others and with the first again: tokens and states are those
    of a plain engine of either, so nothing is left of the weights before."""
    first, turns = spec.model, _few_turns(vocab)
    asked = [
        dataclasses.replace(turns, name="first"),
        dataclasses.replace(turns, name="other", weights=other),
        dataclasses.replace(turns, name="again", weights=first),
    ]
    result = run(spec, asked)
    compared = 0
    for scenario, model in zip(asked, (first, other, first), strict=True):
        shown = part(result, [scenario], model)
        assert shown.outcomes and shown.cached_tokens > 0
        compared += check_equal(shown, [dataclasses.replace(scenario, weights=None)]).compared
    assert compared == len(result.records)
    said = {name: [result.outcomes[f"{name}/{r.rid}"].tokens for r in turns.requests] for name in ("first", "other")}
    assert all(a != b for a, b in zip(*said.values(), strict=True)), "the other weights say the same"


def _case(family: str, mode: str) -> Case:
    algorithm, cache = CELL[family]
    return Case(family, algorithm, cache if mode == "replay" else "extra_buffer-overlap", mode)


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), _cells())
def test_serves_as_one_started_with_them(family, mode, checkpoint, others):
    _check(_case(family, mode).spec(checkpoint(family)), checkpoint.vocab, others(family))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family, checkpoint, others):
    """CUDA graphs are captured once, and read the weights where they lie."""
    spec = _case(family, "replay").spec(checkpoint(family), device="cuda", record_live=False, timeout=400.0)
    _check(spec, checkpoint.vocab, others(family))
