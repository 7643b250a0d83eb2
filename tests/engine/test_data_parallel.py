"""Data-parallel attention: a rank has requests of its own, and forwards with the others; tokens and states of all ranks
equal one plain rank's."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace

import pytest

from . import ranks, scenarios
from .harness import STATE_BOUND, baseline, check_equal, compare_states, run, token_differences
from .matrix import CACHES, FAMILIES, IN_FULL, Case, caches
from .scenario import Request, Scenario
from .spec import EngineSpec
from .weights import VOCAB

OLD = importlib.metadata.version("sglang") == "0.5.17"

ALGORITHMS = ("nextn-chain", "nextn-tree")
"""SGLang refuses data-parallel attention with NGRAM."""

FAST = {("gdn", "nextn-chain", "rewind", "replay"), ("mamba2", "nextn-tree", "extra_buffer-overlap", "replay")}
"""A cell a family."""

IDLE_DRAFT = pytest.mark.skipif(not OLD, reason=ranks.IDLE_DRAFT_FAILS)


def _cells() -> list:
    cells = [
        (family, algorithm, cache, mode)
        for family in FAMILIES
        for mode in (*IN_FULL, "snapshot")
        for algorithm in ALGORITHMS
        for cache in caches(mode)
        if CACHES[cache].get("overlap", False)  # what SGLang does unless told otherwise
    ]
    return [pytest.param(*cell, id="-".join(cell), marks=_marks(cell)) for cell in cells]


def _marks(cell: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    marks = [] if cell in FAST else [pytest.mark.slow]
    return [*marks, IDLE_DRAFT] if cell[0] == "mamba2" else marks


def _todo() -> list[Scenario]:
    """Two scenarios a rank, so uneven that each rank idles while the other works."""
    return list(scenarios.unhurried(VOCAB - 1))


def _spec(case: Case, checkpoint, **changes) -> EngineSpec:
    return case.spec(checkpoint(case.family), ranks=2, data_parallel=True, **changes)


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "algorithm", "cache", "mode"), _cells())
def test_ranks_with_requests_of_their_own(family, algorithm, cache, mode, checkpoint):
    """Batches of other sizes, prefills beside decodes, idle ranks: what one rank pads is nobody's state."""
    todo = _todo()
    result = run(_spec(Case(family, algorithm, cache, mode), checkpoint), todo)
    check_equal(result, todo)
    assert result.cached_tokens > 0
    assert {"prefill", "decode", "insert", "radix"} <= {record.kind for record in result.records}


@pytest.mark.slow
def test_a_fault_on_one_rank_is_seen(checkpoint):
    todo = _todo()
    case = Case("gdn", "nextn-chain", "rewind", "replay")
    spec = _spec(case, checkpoint, sabotage="commit_one_less", sabotaged_rank=1)
    result = run(spec, todo)
    differing = {line.partition("/")[0] for line in token_differences(result, baseline(spec, todo))}
    states = compare_states(result)
    assert states.worst > 1000 * STATE_BOUND and len(states.bad) > 10
    assert differing <= {scenario.name for scenario in ranks.share(spec, todo, 1)}, "it spread to the other rank"


# --------------------------------------------------------------------------------------------------- who is asked what


def test_scenarios_are_dealt_to_ranks():
    todo = [Scenario(name, (Request("r", (5, 6, 7), 8),)) for name in "abc"]
    apart = EngineSpec(model="", ranks=2, data_parallel=True)
    assert [[each.name for each in ranks.share(apart, todo, rank)] for rank in (0, 1)] == [["a", "c"], ["b"]]
    assert ranks.share(dataclasses.replace(apart, data_parallel=False), todo, 1) == todo


def test_all_ranks_tokens_and_states_are_one_result():
    spec = EngineSpec(model="", ranks=2, data_parallel=True)
    sizes = dict.fromkeys(("draft_state_bytes", "pool_bytes", "slot_bytes", "released_bytes"), 3)

    @dataclasses.dataclass
    class Part(SimpleNamespace):
        spec: EngineSpec
        outcomes: dict
        records: list
        draft_state_bytes: int = 0
        pool_bytes: int = 0
        slot_bytes: int = 0
        released_bytes: int = 0

    whole = ranks.joined([Part(spec, {"a/r": 1}, ["x"], **sizes), Part(spec, {"b/r": 2}, ["y"], **sizes)])
    assert whole.outcomes == {"a/r": 1, "b/r": 2} and whole.records == ["x", "y"] and whole.pool_bytes == 6
