"""Tensor parallel: tokens of every rank, and the ranks' pool states put together, equal those of one plain rank."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from . import ranks, scenarios
from .harness import STATE_BOUND, EngineError, baseline, check_equal, compare_states, run, token_differences
from .matrix import FAMILIES, IN_FULL, Case, caches
from .scenario import Request, Scenario
from .spec import EngineSpec
from .states import Record, Shards, State, as_prefix, relative_error
from .weights import VOCAB

MODELS = {"gdn": "gdn", "mamba2": "mamba2", "granite4": "mamba2", "qwen3_5_moe": "gdn"}
"""Family by model. Granite 4 has one group for all heads, which every rank repeats; Nemotron-H's are divided."""

CELLS = (
    ("gdn", "nextn-chain", "no_buffer"),
    ("gdn", "nextn-tree", "extra_buffer-overlap"),
    ("gdn", "ngram-tree", "extra_buffer_lazy"),
    ("gdn", "nextn-tree", "rewind"),
    ("mamba2", "nextn-chain", "extra_buffer_lazy"),
    ("mamba2", "nextn-tree", "no_buffer"),
    ("mamba2", "ngram-tree", "extra_buffer-overlap"),
    ("mamba2", "ngram-tree", "rewind"),
    ("granite4", "ngram-tree", "extra_buffer-overlap"),
    ("granite4", "ngram-chain", "no_buffer"),
    ("qwen3_5_moe", "nextn-chain", "no_buffer"),
)

FAST = {
    ("gdn", "nextn-tree", "extra_buffer-overlap", "replay"),
    ("gdn", "nextn-tree", "rewind", "replay"),
    ("granite4", "ngram-tree", "extra_buffer-overlap", "replay"),
}
"""An engine a family, and one that rewinds."""

EXPERTS = (
    ("gdn", "nextn-tree", "extra_buffer-overlap", "slots"),
    ("granite4", "ngram-tree", "rewind", "replay"),
    ("granite4", "ngram-tree", "extra_buffer-overlap", "slots"),
)
"""More cells of models with experts."""


def _cells() -> list:
    cells = [(*cell, mode) for cell in CELLS for mode in IN_FULL if cell[-1] in caches(mode)]
    return [pytest.param(*cell, id="-".join(cell), marks=() if cell in FAST else pytest.mark.slow) for cell in cells]


@pytest.fixture
def folder_of(checkpoint, written):
    """``folder_of(model)`` is the folder of its checkpoint."""
    return lambda model: checkpoint(model) if model in FAMILIES else written(model)


def _turns(model: str) -> list[Scenario]:
    """The scenario as other tests ask it of this model, whose plain run is then there already."""
    return [scenarios.turns(VOCAB - 1 if model in FAMILIES else VOCAB - 5)]


@pytest.mark.in_turn
@pytest.mark.parametrize(("model", "algorithm", "cache", "mode"), _cells())
def test_two_ranks_do_what_one_does(model, algorithm, cache, mode, folder_of):
    """Prefix hits and follow-ups on tokens and states of two ranks; every state is put together from both."""
    todo = _turns(model)
    result = run(Case(MODELS[model], algorithm, cache, mode).spec(folder_of(model), ranks=2), todo)
    check_equal(result, todo)
    assert result.cached_tokens > 0
    assert {"prefill", "decode", "insert", "radix"} <= {record.kind for record in result.records}
    heads = {record.state.temporal.shape[1] for record in result.records}
    cut = result.shards.widths[2 if MODELS[model] == "gdn" else 0]
    assert heads == {2 * cut // result.records[0].state.temporal.shape[2]}, "a rank had all heads"
    assert any(result.shards.repeated) == (model == "granite4")


@pytest.mark.parametrize(
    ("model", "algorithm", "cache", "mode"),
    [
        ("gdn", "nextn-tree", "rewind", "replay"),
        *(pytest.param(model, *cell, marks=pytest.mark.slow) for model, *cell in EXPERTS),
    ],
)
def test_each_rank_has_experts_of_its_own(model, algorithm, cache, mode, folder_of):
    """``--ep-size 2``: a rank computes those tokens that its experts are chosen for, and all heads as before."""
    todo = _turns(model)
    result = run(
        Case(MODELS[model], algorithm, cache, mode).spec(folder_of(model), ranks=2, extra={"ep_size": 2}), todo
    )
    check_equal(result, todo)
    assert result.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", IN_FULL)
@pytest.mark.parametrize("model", ["gdn", "granite4"])
def test_a_fault_on_one_rank_is_seen(model, mode, folder_of):
    """That rank's heads are wrong, and with them every answer that reads them. Where both ranks have the channels of a
    group they are compared with each other before anything else."""
    todo = _turns(model)
    case = Case(MODELS[model], "ngram-tree", "no_buffer", mode)
    spec = case.spec(folder_of(model), ranks=2, sabotage="skip_settle", sabotaged_rank=1)
    if model == "granite4":
        with pytest.raises(EngineError, match="ranks differ in channels that each of them has"):
            run(spec, todo)
        return
    result = run(spec, todo)
    assert token_differences(result, baseline(result.spec, todo))
    states = compare_states(result)
    assert states.worst > 1000 * STATE_BOUND and len(states.bad) > 10


def test_a_dead_rank_is_told(folder_of, monkeypatch):
    """The other waits for it, and is not waited for."""
    monkeypatch.setattr(ranks, "GRACE", 1.0)
    spec = Case("gdn", "ngram-tree", "no_buffer", "replay").spec(folder_of("gdn"), ranks=2, sabotage="die")
    with pytest.raises(EngineError, match=r"(?s)exit code 3.*last words"):
        run(dataclasses.replace(spec, sabotaged_rank=1), [Scenario("one", (Request("r", (5, 6, 7), 8),))])


# ------------------------------------------------------------------------------------------------- how states are cut


def _cut(whole: State, shards: Shards, count: int) -> list[State]:
    """The whole state as ``count`` ranks have it."""
    heads = whole.temporal.chunk(count, dim=1)
    sizes = [
        width if repeated else width * count for width, repeated in zip(shards.widths, shards.repeated, strict=True)
    ]
    inputs = [
        [channels] * count if repeated else channels.chunk(count, dim=1)
        for channels, repeated in zip(whole.conv[0].split(sizes, dim=1), shards.repeated, strict=True)
    ]
    return [State(heads[rank], (torch.cat([each[rank] for each in inputs], dim=1),)) for rank in range(count)]


@pytest.mark.parametrize("repeated", [(False, False, False), (False, True, True)])
def test_parts_make_the_whole(repeated):
    shards = Shards((8, 6, 6), repeated)
    whole = State(torch.randn(3, 4, 5, 7), (torch.randn(3, 28 if any(repeated) else 40, 3),))
    parts = _cut(whole, shards, 2)
    assert relative_error(shards.joined(parts), whole) == 0
    changed = State(parts[1].temporal.clone(), parts[1].conv)
    changed.temporal[2, 1] *= 1 + 1e-3
    assert 1e-5 < relative_error(shards.joined([parts[0], changed]), whole) < 1e-2


def test_ranks_that_differ_in_what_each_has():
    shards = Shards((8, 6, 6), (False, True, True))
    parts = _cut(State(torch.randn(3, 4, 5, 7), (torch.randn(3, 28, 3),)), shards, 2)
    parts[1].conv[0][0, 9, 1] += 1
    with pytest.raises(AssertionError, match="ranks differ in channels"):
        shards.joined(parts)


@pytest.mark.parametrize("name, value", [("outcomes", {"s/r": [1, 2]}), ("forwards", 4)])
def test_ranks_that_did_not_do_the_same(name, value):
    same = {"outcomes": {}, "insertions": 0, "steps": 3, "forwards": 3, "pool": "p", "hooks": [], "graphs": 0}
    same["spec"] = EngineSpec(model="", ranks=2)
    with pytest.raises(AssertionError, match=f"rank 1 differs from rank 0 in {name}"):
        ranks.joined([SimpleNamespace(**same), SimpleNamespace(**{**same, name: value})])


def test_ranks_that_saw_other_states():
    state = State(torch.zeros(1, 1, 1, 1), ())
    one, other = (Record("decode", f"r@{step}", as_prefix([1]), state) for step in (3, 4))
    with pytest.raises(AssertionError, match="rank 1 has decode r@4 where rank 0 has decode r@3"):
        ranks.joined_record(Shards((), ()), [one, other])
