"""Constrained answers under speculation that end inside accepted runs, and follow-ups on their cached states."""

from __future__ import annotations

import importlib.metadata
import itertools

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import FAMILY_MODES, MODES, Case

AHEAD = (
    "SGLang 0.5.17: where a grammar ends inside an accepted run, the tokens past its end are dropped from the request "
    "but are in its state, which no_buffer then caches under the shorter key (0.5.23 caches nothing then)"
)
CELLS = (
    ("ngram-tree", "no_buffer"),
    ("ngram-tree", "extra_buffer"),
    ("ngram-tree", "extra_buffer-overlap"),
    ("nextn-tree", "extra_buffer_lazy"),
)


def _cases() -> list:
    params = []
    for (family, mode), (algorithm, cache) in itertools.product(FAMILY_MODES, CELLS):
        case = Case(family, algorithm, cache, mode)
        wrong = cache == "no_buffer" and importlib.metadata.version("sglang").startswith("0.5.17")
        marks = [pytest.mark.xfail(reason=AHEAD, strict=True, raises=AssertionError)] if wrong else []
        if mode != MODES[family][0]:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(case, id=case.name, marks=marks))
    return params


@pytest.mark.parametrize("case", _cases())
def test_grammar(case: Case, checkpoint):
    todo = [scenarios.grammars(checkpoint.vocab)]
    check_equal(run(case.spec(checkpoint(case.family)), todo), todo)
