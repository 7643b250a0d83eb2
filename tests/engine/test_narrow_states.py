"""Recurrent states of 16 bits (``--mamba-ssm-dtype``): no farther from float32's than SGLang's own verify leaves them
(`narrow`)."""

from __future__ import annotations

import dataclasses

import pytest

from . import narrow, scenarios
from .harness import baseline, plain_spec, run
from .matrix import FAMILIES, IN_FULL, Case
from .spec import EngineSpec, Result

CACHE = {"gdn": "extra_buffer-overlap", "mamba2": "no_buffer"}

_runs: dict[str, Result] = {}


def _run(spec: EngineSpec, todo: list) -> Result:
    """As `harness.run`, once a configuration."""
    if spec.key() not in _runs:
        _runs[spec.key()] = run(spec, todo)
    return _runs[spec.key()]


def _cells() -> list:
    cells = [(family, mode, dtype) for family in FAMILIES for mode in IN_FULL for dtype in narrow.EPS]
    fast = [pytest.mark.slow if (mode, dtype) != ("replay", "bfloat16") else () for _, mode, dtype in cells]
    return [pytest.param(*cell, id="-".join(cell), marks=marks) for cell, marks in zip(cells, fast, strict=True)]


@pytest.mark.parametrize(("family", "mode", "dtype"), _cells())
def test_no_farther_off_than_stock(family, mode, dtype, checkpoint):
    todo = [scenarios.turns(checkpoint.vocab)]
    extra = {"extra": {"mamba_ssm_dtype": dtype}}
    case = Case(family, narrow.ALGORITHM[family], CACHE[family], mode)
    result = _run(case.spec(checkpoint(family), **extra), todo)
    stock = _run(dataclasses.replace(case, mode="off").spec(checkpoint(family), **extra), todo)
    plain = _run(dataclasses.replace(plain_spec(result.spec), **extra), todo)
    narrow.check(result, stock, baseline(result.spec, todo), plain, dtype)
