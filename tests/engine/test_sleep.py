"""Sleep mode: after `release_memory_occupation` and `resume_memory_occupation` the engine serves as a new one does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from . import scenarios
from .harness import EngineError, check_equal, run
from .matrix import ENGINE, FAMILIES, FAMILY_MODES, IN_FULL, Case, in_families, marks
from .scenario import Scenario
from .sleep import KV_CACHE, MemorySaver
from .spec import EngineSpec


def test_memory_that_was_given_back_is_not_to_be_touched():
    """By the stand-in for what a GPU ends an engine for: read or written; its shape may be looked at."""
    saver = MemorySaver()
    with saver.region(KV_CACHE):
        given_back = torch.zeros(3, 4)
    kept = torch.zeros(4)
    saver.pause(KV_CACHE)
    assert given_back[1:].T.shape == (4, 2) and (kept + 1).sum() == 4
    for touch in (lambda: given_back[1:].sum(), lambda: given_back[0].zero_(), lambda: kept.copy_(given_back[2])):
        with pytest.raises(AssertionError, match="given back"):
            touch()
    saver.resume(KV_CACHE)
    given_back.zero_()
    assert given_back.sum() == 0


def asleep(scenario: Scenario) -> Scenario:
    """The scenario after the server has slept."""
    return dataclasses.replace(scenario, name=f"{scenario.name} after sleep", sleep=True)


def sleepy(case: Case, checkpoint, **changes) -> EngineSpec:
    """The case's engine, whose memory can be given back."""
    extra = {**ENGINE[case.family].get("extra", {}), "enable_memory_saver": True}
    return case.spec(checkpoint(case.family), extra=extra, **changes)


IN_THE_OTHER_ORDER = {("gdn", "slots-kv"), ("mamba2", "replay-kv")}


def _cases() -> list:
    caches = {"gdn": "extra_buffer-overlap", "mamba2": "no_buffer"}
    params = []
    for family, mode in FAMILY_MODES:
        for cache in ("extra_buffer-overlap", "no_buffer"):
            case = Case(family, "nextn-tree", cache, mode)
            quick = cache == caches[family] and (mode in IN_FULL or (family, mode) in IN_THE_OTHER_ORDER)
            params.append(pytest.param(case, id=case.name, marks=marks(mode, quick)))
    return params


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _cases())
def test_serves_right_after_sleep(case: Case, checkpoint):
    """Everything behind the pool is given back, comes back as garbage, and nobody can tell. Twice, and with something
    to forget each time."""
    vocab = checkpoint.vocab
    turns = scenarios.turns(vocab)
    todo = [turns, asleep(turns), scenarios.aborts(vocab), asleep(scenarios.shared(vocab))]
    result = run(sleepy(case, checkpoint), todo)
    assert result.kept == []
    check_equal(result, todo)
    assert result.outcomes[f"{todo[1].name}/a1"].cached_tokens == 0, "the cache was not emptied"


LEFT = {("gdn", "replay"), ("mamba2", "slots"), ("gdn", "slots-kv")}
"""Every mode with one family."""


@pytest.mark.parametrize("family, mode", in_families([*IN_FULL, "slots-kv"], quick=LEFT))
def test_contents_left_as_they_came_back_are_seen(family, mode, checkpoint):
    """The fault that the test above must not miss: nothing is put right. Wrong answers, or an index out of bounds."""
    todo = [asleep(scenarios.turns(checkpoint.vocab))]
    with pytest.raises((EngineError, AssertionError)):
        check_equal(
            run(sleepy(Case(family, "nextn-tree", "no_buffer", mode), checkpoint, sabotage="skip_renew"), todo), todo
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", IN_FULL)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family, mode, checkpoint):
    """The real memory saver, CUDA graphs captured before the first sleep and replayed after it.

    Windows (draft slots) are by far the largest part of this pool: memory given back without them is not enough.
    """
    todo = [
        asleep(scenarios.turns(checkpoint.vocab)),
        scenarios.aborts(checkpoint.vocab),
        asleep(scenarios.shared(checkpoint.vocab)),
    ]
    case = Case(family, "nextn-tree", "extra_buffer-overlap", mode)
    spec = sleepy(
        case,
        checkpoint,
        device="cuda",
        record_live=False,
        timeout=400.0,
        max_running_requests=64,
        max_mamba_cache_size=384,
        max_total_tokens=4096,
        env={"SGLANG_MAMBA_MTP_WINDOW": "60"} if mode == "replay" else {},
    )
    result = run(spec, todo)
    assert result.graphs > 0
    assert result.released_bytes >= result.pool_bytes
    check_equal(result, todo)
