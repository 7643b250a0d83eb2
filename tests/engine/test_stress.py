"""A busy server with few slots: nothing stale is served, nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from . import logprobs, stress
from .harness import baseline, check_equal, run, run_beside_plain
from .matrix import FAMILIES, FEW_SLOTS, IN_FULL, MIXED, Case, caches
from .scenario import Scenario
from .spec import Result

CASES = {
    "gdn": Case("gdn", "nextn-tree", "extra_buffer-overlap", "replay"),
    "mamba2": Case("mamba2", "ngram-tree", "no_buffer", "replay"),
}
REWOUND = Case("gdn", "nextn-tree", "rewind", "replay")
LONG = 1200
"""Requests of the slow runs."""


def _check(result: Result, todo: list) -> None:
    """That answers and states are right, and that the run met what it is for."""
    check_equal(result, todo)
    outcomes, wanted = result.outcomes.values(), baseline(result.spec, todo).outcomes
    assert sum(outcome.retractions for outcome in outcomes) > 0, "nothing was retracted"
    assert sum(outcome.aborted for outcome in outcomes) > 0, "nothing was aborted"
    assert {how for how, running in result.paused if running > 1} == {*stress.PAUSES}, f"paused: {result.paused}"
    assert result.cached_tokens > 0, "the radix cache was not exercised"
    assert {"length", "stop", "abort"} <= {outcome.finish for outcome in outcomes}
    assert any(outcome.free for outcome in outcomes), "nothing was drawn or penalised"
    told = [(outcome, wanted[key]) for key, outcome in result.outcomes.items() if outcome.logprobs and not outcome.free]
    assert len(told) >= 3 and any(outcome.prompt_logprobs for outcome, _ in told), "no log-probabilities were compared"
    ends = [min(len(got.logprobs), len(want.logprobs)) for got, want in told]
    pairs = zip(told, ends, strict=True)
    worst = max(logprobs.difference(got.logprobs[:n], want.logprobs[:n]) for (got, want), n in pairs)
    print(f"; log-probabilities of {sum(ends)} tokens, worst {worst:.1e}", end="")


@pytest.mark.parametrize("case", [*CASES.values(), REWOUND], ids=lambda case: case.name)
def test_answers_under_load_are_those_without_speculation(case, checkpoint):
    todo = stress.waves(1, 60, checkpoint.vocab, size=30)
    _check(run(case.spec(checkpoint(case.family), **FEW_SLOTS[case.cache]), todo), todo)


@pytest.mark.once
@pytest.mark.parametrize(("family", "fault"), [("gdn", "track_root"), ("mamba2", "skip_settle")])
def test_a_fault_does_not_survive_it(family, fault, checkpoint):
    case = CASES[family]
    todo = stress.waves(1, 60, checkpoint.vocab, size=30)
    with pytest.raises(AssertionError):
        check_equal(run(case.spec(checkpoint(family), sabotage=fault, **FEW_SLOTS[case.cache]), todo), todo)


def _reloaded(todo: list[Scenario], model: str) -> list[Scenario]:
    """The waves, before every fifth of which the same weights are loaded again."""
    return [replace(wave, weights=model if i % 5 == 4 else None) for i, wave in enumerate(todo)]


LEFT = 256
"""Bytes of tensors that a request may leave on average: less than a block of PyTorch's allocator of a GPU."""


def _check_growth(result: Result, requests: int) -> None:
    """Tensors do not grow with the requests: the last quarter of the moments when the cache was empty against the
    second one."""
    in_use = [used for used, _ in result.memory]
    quarter = len(in_use) // 4
    early, late = in_use[quarter : 2 * quarter], in_use[-quarter:]
    growth = (sum(late) - sum(early)) / quarter / (requests * (len(in_use) - 2 * quarter) / len(in_use))
    print(f"; a request leaves {growth:.0f} bytes", end="")
    assert growth < LEFT, "\n".join([f"bytes in use: {in_use}", *result.holders])


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "mode"), [(cache, mode) for mode in IN_FULL for cache in caches(mode)])
@pytest.mark.parametrize("family", FAMILIES)
def test_for_long(family, cache, mode, checkpoint):
    """States are compared where the radix cache is handed them; those of running requests are the short run's."""
    case = Case(family, CASES[family].algorithm, cache, mode)
    model, todo = checkpoint(family), stress.waves(2, LONG, checkpoint.vocab)
    if case.algorithm.startswith("nextn"):  # 0.5.17 ends where NGRAM is told to load weights, which it has none of
        todo = _reloaded(todo, model)
    changes = {**FEW_SLOTS[cache], "record_live": False, "timeout": 3600.0, "max_steps": 200_000}
    result = run(case.spec(model, **changes), todo)
    _check(result, todo)
    _check_growth(result, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["no_buffer", "extra_buffer-overlap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_mixed_chunks(family, cache, checkpoint):
    """Running requests decode in the batches of others' prefills, from 0.5.19 on."""
    todo = stress.waves(3, 200, checkpoint.vocab)
    changes = {**FEW_SLOTS[cache], "record_live": False, "timeout": 1800.0, "max_steps": 200_000}
    _check(
        run(Case(family, "nextn-tree", cache, "replay").spec(checkpoint(family), extra=MIXED, **changes), todo), todo
    )


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "mode"), [("rewind", "replay"), ("extra_buffer-overlap", "slots")])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_prompts_of_thousands_of_tokens(family, cache, mode, checkpoint):
    """As long as the model's positions allow for; they are prefilled in many chunks, beside short ones."""
    todo = stress.waves(4, 120, checkpoint.vocab, size=30, mix=stress.Mix(longest=3000))
    assert max(len(request.prompt) for wave in todo for request in wave.requests) > 2000
    room = {"max_total_tokens": 16_384, "chunked_prefill_size": 256, "timeout": 1800.0, "max_steps": 200_000}
    case = Case(family, "nextn-tree", cache, mode)
    _check(run(case.spec(checkpoint(family), record_live=False, **{**FEW_SLOTS[cache], **room}), todo), todo)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "mode"), [("rewind", "replay"), ("extra_buffer-overlap", "slots")])
@pytest.mark.parametrize("family", FAMILIES)
def test_for_long_on_a_gpu(family, cache, mode, checkpoint):
    """With CUDA graphs and overlap."""
    case = Case(family, CASES[family].algorithm, cache, mode)
    todo = stress.waves(2, LONG, checkpoint.vocab)
    changes = {**FEW_SLOTS[cache], "record_live": False, "timeout": 560.0, "max_steps": 200_000}
    (result,) = run_beside_plain([(case.spec(checkpoint(family), device="cuda", **changes), todo)])
    assert result.graphs > 0
    _check(result, todo)
    _check_growth(result, LONG)
    taken = [total for _, total in result.memory]
    print(f"; memory taken {taken[0]} to {taken[-1]} bytes", end="")
    assert taken[-1] <= taken[len(taken) // 2], f"the second half of the waves took more memory: {taken}"
