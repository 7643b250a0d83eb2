"""Recurrent states of 16 bits: no farther from float32's than SGLang's own verify leaves them.

A state rounded differently is another state, so tokens may differ where the best led the next best by little. What a
state after the same tokens should be is known all the same: an engine with float32 states says it.
"""

from __future__ import annotations

import math

from . import rounding
from .harness import reference_states
from .spec import Result
from .states import State, relative_error

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance between neighbours at 1."""

AGAINST_STOCK = {"replay": 0.8, "slots": 1.01}
"""What our states' error, root of its mean square, may be of stock's: slots round as stock does, replay more seldom."""

ALGORITHM = {"gdn": "nextn-tree", "mamba2": "nextn-chain"}


def check(result: Result, stock: Result, exact: Result, plain: Result, dtype: str) -> None:
    """Compare a run with states of ``dtype`` with SGLang's own verify of the same, its states with those of a plain
    engine of float32 (``exact``), and its tokens with those of a ``plain`` one of ``dtype``."""
    ours, theirs = _errors(result), _errors(stock)
    print(
        f"; error {_rms(ours):.1e} of {max(ours):.1e} at most, stock's {_rms(theirs):.1e} of {max(theirs):.1e}", end=""
    )
    assert result.accept_length > 1.05 and result.cached_tokens > 0
    bound = AGAINST_STOCK[result.spec.mode] * _rms(theirs)
    assert 0.1 * EPS[dtype] < _rms(ours) <= bound, "or the states are not of 16 bits"
    assert max(ours) < 2 * EPS[dtype]

    tie = rounding.FACTOR * max(abs(lead - plain.gaps[at]) for at, lead in exact.gaps.items() if at in plain.gaps)
    wrong, ties = rounding.token_differences(result, plain, tie)
    print(f"; {len(ties)} ties", end="")
    assert not wrong, wrong


def _errors(result: Result) -> list[float]:
    """Relative errors of the recurrent states against float32's after the same tokens."""
    exact = reference_states(result.spec, [record.prefix for record in result.records])
    pairs = [(record.state.temporal, exact[record.prefix].temporal) for record in result.records]
    return [relative_error(State(got, ()), State(want, ())) for got, want in pairs]


def _rms(errors: list[float]) -> float:
    return math.sqrt(sum(error * error for error in errors) / len(errors))
