"""``--enable-int8-mamba-checkpoint``: the radix cache keeps its states in int8, in a pool of SGLang's own.

A request that goes on from such a state has a rounded one, with the plugin or without. What that does to states and to
the lead of the best token is measured on engines that do not speculate (`rounding`), and bounds what it may do here.
States that no rounded one precedes are those of a plain engine, put through SGLang's own rounding.
"""

from __future__ import annotations

import dataclasses

import pytest

from . import rounding, scenarios
from .harness import all_run, plain_spec, reference_states, run
from .matrix import FAMILIES, Case, caches
from .scenario import Scenario
from .spec import EngineSpec, Result
from .states import Prefix, Record, State, relative_error

INT8 = {"enable_int8_mamba_checkpoint": True}

ONE_STEP = 2e-3
"""Largest relative error of a rounded state, where an entry on the edge of a step goes the other way."""

QUICK = {
    ("gdn", "nextn-tree", "rewind", "replay"),
    ("mamba2", "nextn-chain", "no_buffer", "replay"),
    ("gdn", "nextn-chain", "extra_buffer-overlap", "slots"),
}


def _cells() -> list:
    cells = [
        (family, algorithm, cache, mode)
        for family in FAMILIES
        for algorithm in ("nextn-chain", "nextn-tree")
        for mode in ("replay", "slots", "replay-kv", "snapshot")
        for cache in caches(mode)
    ]
    return [pytest.param(Case(*c), id="-".join(c), marks=() if c in QUICK else pytest.mark.slow) for c in cells]


def _plain_ones(spec: EngineSpec) -> tuple[EngineSpec, EngineSpec]:
    """Engines that do not speculate: without a radix cache, and with one in int8."""
    plain = plain_spec(spec)
    return plain, dataclasses.replace(plain, radix="no_buffer", extra=INT8)


_plain: dict[str, list[Result]] = {}


def _not_speculating(spec: EngineSpec, todo: list[Scenario]) -> list[Result]:
    """The runs of `_plain_ones`, once a model."""
    if spec.model not in _plain:
        _plain[spec.model] = [run(each, todo) for each in _plain_ones(spec)]
    return _plain[spec.model]


def _todo(vocab: int) -> list[Scenario]:
    return [scenarios.returning(vocab), scenarios.turns(vocab)]


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _cells())
def test_what_is_cached_is_the_whole_state_and_what_is_loaded_is_it(case, checkpoint):
    todo = _todo(checkpoint.vocab)
    spec = case.spec(checkpoint(case.family), retract_every=9, extra=INT8)
    plain = _not_speculating(spec, todo)
    _check(run(spec, todo), *plain)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family, checkpoint):
    """Streams of their own: a state is quantised on the scheduler's beside the next verify, loaded on the model's."""
    todo = _todo(checkpoint.vocab)
    cases = [
        Case(family, "nextn-tree", "rewind", "replay"),
        Case(family, "nextn-chain", "extra_buffer-overlap", "slots"),
    ]
    changes = {"device": "cuda", "record_live": False, "timeout": 400.0, "extra": INT8}
    specs = [case.spec(checkpoint(family), **changes) for case in cases]
    plain, in_int8, *results = all_run([(each, todo) for each in (*_plain_ones(specs[0]), *specs)], at_once=4)
    for result in results:
        assert result.graphs > 0
        _check(result, plain, in_int8)


def _check(result: Result, plain: Result, in_int8: Result) -> None:
    """What rounding does is measured where nothing speculates, between ``plain`` and ``in_int8``."""
    assert ("radix rewind, " in result.log) == ("SGLANG_MAMBA_MTP_RADIX" in result.spec.env)
    assert result.accept_length > 1.05 and result.cached_tokens > 0
    rounding_does = rounding.spread(plain, [in_int8])
    wrong, ties = rounding.token_differences(result, plain, rounding_does.tie)
    exact = reference_states(result.spec, [record.prefix for record in result.records])
    errors = [relative_error(record.state, exact[record.prefix]) for record in result.records]
    once = [relative_error(record.state, _rounded(exact[record.prefix])) for record in _rounded_once(result)]
    print(
        f"; {len(errors)} states, {max(errors):.1e} at most, rounding does {rounding_does.state:.1e}; {len(once)} "
        f"rounded once, {max(once):.1e}; {len(ties)} ties",
        end="",
    )
    assert not wrong, wrong
    assert max(errors) < rounding.FACTOR * rounding_does.state
    assert len(once) >= 5 and max(once) < ONE_STEP


def _rounded_once(result: Result) -> list[Record]:
    """What the radix cache was given before it had anything that could have been gone on from."""
    found: list[Record] = []
    before: list[Prefix] = []
    for record in result.records:
        if record.kind == "insert":
            if not any(record.prefix != earlier and record.prefix.startswith(earlier) for earlier in before):
                found.append(record)
            before.append(record.prefix)
    return found


def _rounded(state: State) -> State:
    from sglang.srt.mem_cache.mamba_checkpoint_pool import Int8CheckpointStore

    temporal = Int8CheckpointStore.dequantize(*Int8CheckpointStore.quantize(state.temporal), state.temporal.dtype)
    return State(temporal, state.conv)
