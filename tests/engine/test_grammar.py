"""Constrained answers under speculation that end inside accepted runs, and follow-ups on their cached states."""

from __future__ import annotations

import itertools

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import FAMILY_MODES, IN_FULL, Case

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
        marks = () if mode in IN_FULL else pytest.mark.slow
        params.append(pytest.param(case, id=case.name, marks=marks))
    return params


@pytest.mark.parametrize("case", _cases())
def test_grammar(case: Case, checkpoint):
    todo = [scenarios.grammars(checkpoint.vocab)]
    check_equal(run(case.spec(checkpoint(case.family)), todo), todo)
