"""A busy server with few slots: nothing stale is served, nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from . import feeder, logprobs, stress
from .gpu_engines import VERSION
from .harness import EngineError, all_run, baseline, check_equal, part, plain_spec, remember, run
from .matrix import FAMILIES, FEW_SLOTS, IN_FULL, MIXED, Case, caches
from .scenario import Scenario
from .spec import EngineSpec, Result

CASES = {
    "gdn": Case("gdn", "nextn-tree", "extra_buffer-overlap", "replay"),
    "mamba2": Case("mamba2", "nextn-tree", "no_buffer", "replay"),
}
REWOUND = Case("gdn", "ngram-tree", "rewind", "replay")

LONG_DRAFTS = {"gdn": "nextn-tree", "mamba2": "ngram-tree"}
LONG = 1200
"""Requests of the slow runs."""


@dataclass(frozen=True)
class Load:
    """What an engine goes through: the waves, and by weights what `stress.asked` of them.

    SGLang has to be idle to sleep and to load other weights, so both are done between waves. It loads those it has, to
    the same answers, in the pauses inside them as well, and sleeps there where it can.
    """

    spec: EngineSpec
    todo: list[Scenario]

    @classmethod
    def of(
        cls, case: Case, waves: list[Scenario], checkpoint, others, *, mixed: bool = False, device="cpu", **changes
    ) -> Load:
        """A small engine of the case's, which an operator deals with meanwhile. ``mixed``: prefills have decodes in
        their batches."""
        model = checkpoint(case.family)
        # 0.5.17 ends where NGRAM is told to load weights, which it has none of
        loads = case.algorithm.startswith("nextn") or VERSION > (0, 5, 17)
        todo = stress.operated(waves, (model, others(case.family)) if loads else None)
        extra = {"enable_memory_saver": True} | (MIXED if mixed else {})
        return cls(case.spec(model, device=device, extra=extra, **{**FEW_SLOTS[case.cache], **changes}), todo)

    @property
    def asked(self) -> Mapping[str, list[Scenario]]:
        return stress.asked(self.todo, self.spec.model)

    def plain(self) -> list[tuple[EngineSpec, Sequence[Scenario]]]:
        """The engines to compare with, one of each weights."""
        return [(plain_spec(replace(self.spec, model=model)), waves) for model, waves in self.asked.items()]

    def run_beside_plain(self) -> Result:
        """On a GPU, where engines begin together."""
        plain = self.plain()
        result, *found = all_run([(self.spec, self.todo), *plain], at_once=1 + len(plain))
        for (_, waves), each in zip(plain, found, strict=True):
            remember(each, waves)
        return result


def _check(result: Result, load: Load) -> None:
    """That answers and states are right, and that the run met what it is for."""
    compared, wanted = 0, {}
    for model, waves in load.asked.items():
        shown = part(result, waves, model)
        compared += check_equal(shown, waves).compared
        wanted |= baseline(shown.spec, waves).outcomes
    assert compared == len(result.records) and wanted.keys() == result.outcomes.keys()
    _check_met(result, wanted)
    _check_operated(result, load)


def _check_met(result: Result, wanted: Mapping) -> None:
    outcomes = result.outcomes.values()
    assert sum(outcome.retractions for outcome in outcomes) > 0, "nothing was retracted"
    assert sum(outcome.aborted for outcome in outcomes) > 0, "nothing was aborted"
    assert result.cached_tokens > 0, "the radix cache was not exercised"
    assert {"length", "stop", "abort"} <= {outcome.finish for outcome in outcomes}
    assert any(outcome.free for outcome in outcomes), "nothing was drawn or penalised"
    told = [(outcome, wanted[key]) for key, outcome in result.outcomes.items() if outcome.logprobs and not outcome.free]
    assert len(told) >= 3 and any(outcome.prompt_logprobs for outcome, _ in told), "no log-probabilities were compared"
    ends = [min(len(got.logprobs), len(want.logprobs)) for got, want in told]
    pairs = zip(told, ends, strict=True)
    worst = max(logprobs.difference(got.logprobs[:n], want.logprobs[:n]) for (got, want), n in pairs)
    print(f"; log-probabilities of {sum(ends)} tokens, worst {worst:.1e}", end="")


def _check_operated(result: Result, load: Load) -> None:
    paused = {how for how, running in result.paused if running > 1}
    beside_waiting = VERSION > (0, 5, 17) and any(wave.in_pauses for wave in load.todo)
    assert {*stress.PAUSES} - {"retract"} <= paused and paused & {"retract", feeder.ASLEEP}, f"paused: {result.paused}"
    assert (feeder.ASLEEP in paused) == beside_waiting, f"paused: {result.paused}"
    ours = load.spec.mode != "snapshot"
    if ours and load.spec.device == "cpu":  # slots that wait in a queue are no memory of the pool's
        kept = [tensor for tensor in result.kept if not tensor.endswith("()")]
        assert kept == [], "memory that a sleep does not give back"
    if load.spec.extra.get("enable_mixed_chunk"):
        # Up to 0.5.18 SGLang turns mixed chunks off under speculation.
        assert (result.ended_as_tails > 0) == (VERSION > (0, 5, 18)), f"{result.ended_as_tails} tails of prefills"


def _short(case: Case, checkpoint, others, **changes) -> Load:
    """With mixed chunks in the case in which the states of requests that end in them are cached."""
    waves = stress.waves(3, 60, checkpoint.vocab, size=20)
    return Load.of(case, waves, checkpoint, others, mixed=case == CASES["mamba2"], **changes)


@pytest.mark.in_turn
@pytest.mark.parametrize("case", [*CASES.values(), REWOUND], ids=lambda case: case.name)
def test_answers_under_load_are_those_without_speculation(case, checkpoint, others):
    load = _short(case, checkpoint, others)
    _check(run(load.spec, load.todo), load)


@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "fault"),
    [("gdn", "track_root"), ("mamba2", "skip_settle"), ("gdn", "skip_renew"), ("mamba2", "old_decay")],
)
def test_a_fault_does_not_survive_it(family, fault, checkpoint, others):
    load = _short(CASES[family], checkpoint, others, sabotage=fault)
    with pytest.raises((EngineError, AssertionError)):
        _check(run(load.spec, load.todo), load)


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
@pytest.mark.parametrize(
    ("cache", "mode"),
    [*((cache, mode) for mode in IN_FULL for cache in caches(mode)), ("extra_buffer-overlap", "snapshot")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_for_long(family, cache, mode, checkpoint, others):
    """States are compared where the radix cache is handed them; those of running requests are the short run's."""
    case = Case(family, LONG_DRAFTS[family], cache, mode)
    changes = {"record_live": False, "timeout": 3600.0, "max_steps": 200_000}
    load = Load.of(case, stress.waves(2, LONG, checkpoint.vocab), checkpoint, others, **changes)
    result = run(load.spec, load.todo)
    _check(result, load)
    _check_growth(result, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["no_buffer", "extra_buffer-overlap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_mixed_chunks(family, cache, checkpoint, others):
    """Running requests decode in the batches of others' prefills, from 0.5.19 on."""
    case = Case(family, "nextn-tree", cache, "replay")
    changes = {"record_live": False, "timeout": 1800.0, "max_steps": 200_000}
    load = Load.of(case, stress.waves(3, 200, checkpoint.vocab), checkpoint, others, mixed=True, **changes)
    _check(run(load.spec, load.todo), load)


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "mode"), [("rewind", "replay"), ("extra_buffer-overlap", "slots")])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_prompts_of_thousands_of_tokens(family, cache, mode, checkpoint, others):
    """As long as the model's positions allow for; they are prefilled in many chunks, beside short ones."""
    waves = stress.waves(4, 120, checkpoint.vocab, size=30, mix=stress.Mix(longest=3000))
    assert max(len(request.prompt) for wave in waves for request in wave.requests) > 2000
    changes = {"record_live": False, "timeout": 1800.0, "max_steps": 200_000}
    room = {"max_total_tokens": 16_384, "chunked_prefill_size": 256}
    case = Case(family, "nextn-tree", cache, mode)
    load = Load.of(case, waves, checkpoint, others, **changes, **room)
    _check(run(load.spec, load.todo), load)


def _on_a_gpu(family: str, cache: str, mode: str, checkpoint, others, **changes) -> Load:
    """Requests have snapshots by a model's drafts and mixed chunks, or are rewound, which SGLang's mixed chunks are
    not."""
    mixed = cache != "rewind"
    case = Case(family, "nextn-tree" if mixed else LONG_DRAFTS[family], cache, mode)
    waves = stress.waves(2, LONG, checkpoint.vocab)
    limits = {"record_live": False, "timeout": 560.0, "max_steps": 200_000}
    return Load.of(case, waves, checkpoint, others, mixed=mixed, **limits, **changes)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "mode"), [("rewind", "replay"), ("extra_buffer-overlap", "slots")])
@pytest.mark.parametrize("family", FAMILIES)
def test_for_long_on_a_gpu(family, cache, mode, checkpoint, others):
    """With CUDA graphs and overlap."""
    load = _on_a_gpu(family, cache, mode, checkpoint, others, device="cuda")
    result = load.run_beside_plain()
    assert result.graphs > 0
    _check(result, load)
    _check_growth(result, LONG)
    taken = [total for _, total in result.memory]
    print(f"; memory taken {taken[0]} to {taken[-1]} bytes", end="")
    assert taken[-1] <= taken[len(taken) // 2], f"the second half of the waves took more memory: {taken}"
