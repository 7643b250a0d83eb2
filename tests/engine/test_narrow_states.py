"""Recurrent states of 16 bits (``--mamba-ssm-dtype``): no farther from float32's than SGLang's own verify leaves them
(`narrow`)."""

from __future__ import annotations

import dataclasses
import importlib.metadata

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


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode", "dtype"), _cells())
def test_no_farther_off_than_stock(family, mode, dtype, checkpoint):
    _check(Case(family, narrow.ALGORITHM[family], CACHE[family], mode), CACHE[family], dtype, checkpoint)


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
    extra = {"extra": {"mamba_ssm_dtype": dtype}}
    result = _run(case.spec(model, **extra, **changes), todo)
    stock = _run(dataclasses.replace(case, mode="off", cache=cache).spec(model, **extra, **changes), todo)
    plain = _run(dataclasses.replace(plain_spec(result.spec), **extra), todo)
    narrow.check(result, stock, baseline(result.spec, todo), plain, dtype)
