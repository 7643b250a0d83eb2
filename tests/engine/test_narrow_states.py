"""Recurrent states of 16 bits (``--mamba-ssm-dtype``): no farther from float32's than SGLang's own verify leaves them.

A state rounded differently is another state, so tokens may differ where the best led the next best by little. What a
state after the same tokens should be is known all the same: an engine with float32 states says it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math

import pytest

from . import rounding, scenarios
from .harness import baseline, plain_spec, reference_states, run
from .matrix import FAMILIES, IN_FULL, Case
from .spec import EngineSpec, Result
from .states import State, relative_error

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance between neighbours at 1."""

AGAINST_STOCK = {"replay": 0.8, "slots": 1.01}
"""What our states' error, root of its mean square, may be of stock's: slots round as stock does, replay more seldom."""

ALGORITHM = {"gdn": "nextn-tree", "mamba2": "nextn-chain"}
CACHE = {"gdn": "extra_buffer-overlap", "mamba2": "no_buffer"}

_runs: dict[str, Result] = {}


def _run(spec: EngineSpec, todo: list) -> Result:
    """As `harness.run`, once a configuration."""
    if spec.key() not in _runs:
        _runs[spec.key()] = run(spec, todo)
    return _runs[spec.key()]


def _errors(result: Result) -> list[float]:
    """Relative errors of the recurrent states against float32's after the same tokens."""
    exact = reference_states(result.spec, [record.prefix for record in result.records])
    pairs = [(record.state.temporal, exact[record.prefix].temporal) for record in result.records]
    return [relative_error(State(got, ()), State(want, ())) for got, want in pairs]


def _rms(errors: list[float]) -> float:
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def _cells() -> list:
    cells = [(family, mode, dtype) for family in FAMILIES for mode in IN_FULL for dtype in EPS]
    fast = [pytest.mark.slow if (mode, dtype) != ("replay", "bfloat16") else () for _, mode, dtype in cells]
    return [pytest.param(*cell, id="-".join(cell), marks=marks) for cell, marks in zip(cells, fast, strict=True)]


@pytest.mark.parametrize(("family", "mode", "dtype"), _cells())
def test_no_farther_off_than_stock(family, mode, dtype, checkpoint):
    _check(Case(family, ALGORITHM[family], CACHE[family], mode), CACHE[family], dtype, checkpoint)


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("sglang") == "0.5.17", reason="its allocator of pages is a GPU kernel")
@pytest.mark.parametrize("cache", ["rewind", "extra_buffer-overlap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_over_pages_of_64(family, cache, checkpoint):
    """What a Blackwell GPU's server begins with. Stock cannot rewind."""
    case = Case(family, "nextn-chain", cache, "replay")  # on a CPU SGLang verifies trees over single tokens only
    _check(case, "extra_buffer-overlap", "bfloat16", checkpoint, page_size=64, track_interval=64)


def _check(case: Case, cache: str, dtype: str, checkpoint, **changes) -> None:
    """Against stock's verify under ``cache``, and against a float32 engine."""
    todo, model = [scenarios.turns(checkpoint.vocab)], checkpoint(case.family)
    narrow = {"extra": {"mamba_ssm_dtype": dtype}}
    result = _run(case.spec(model, **narrow, **changes), todo)
    stock = _run(dataclasses.replace(case, mode="off", cache=cache).spec(model, **narrow, **changes), todo)
    exact = baseline(result.spec, todo)
    ours, theirs = _errors(result), _errors(stock)
    print(
        f"; error {_rms(ours):.1e} of {max(ours):.1e} at most, stock's {_rms(theirs):.1e} of {max(theirs):.1e}", end=""
    )
    assert result.accept_length > 1.05 and result.cached_tokens > 0
    assert 0.1 * EPS[dtype] < _rms(ours) <= AGAINST_STOCK[case.mode] * _rms(theirs), "or the states are not of 16 bits"
    assert max(ours) < 2 * EPS[dtype]

    plain = _run(dataclasses.replace(plain_spec(result.spec), **narrow), todo)
    tie = rounding.FACTOR * max(abs(lead - plain.gaps[at]) for at, lead in exact.gaps.items() if at in plain.gaps)
    wrong, ties = rounding.token_differences(result, plain, tie)
    print(f"; {len(ties)} ties", end="")
    assert not wrong, wrong
