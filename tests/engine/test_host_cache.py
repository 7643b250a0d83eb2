"""HiCache: states that go to the host and come back, and what follows on them.

The scheduler, the radix cache, its host tier and the controller that copies are SGLang's own; on a CPU the copies are
done when they are issued, and every state that is copied, either way, is compared like all others.
"""

from __future__ import annotations

import itertools

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import FAMILIES, FAMILY_MODES, Case, caches, marks
from .scenario import Scenario
from .spec import EngineSpec, Result

POLICIES = ("write_through", "write_through_selective", "write_back")

FEW_SLOTS = {
    cache: {"max_running_requests": 3, "max_mamba_cache_size": 10}
    if cache in ("no_buffer", "rewind")
    # (with overlap a request takes a slot more)
    else {"max_running_requests": 2, "max_mamba_cache_size": 11 if cache == "extra_buffer-overlap" else 9}
    for cache in caches("replay")
}
"""Engines so small that a conversation's state is evicted before its next turn."""

QUICK = {
    ("gdn", "replay", "rewind", "write_through"),
    ("gdn", "slots", "no_buffer", "write_back"),
    ("mamba2", "replay", "rewind", "write_back"),
    ("mamba2", "slots", "extra_buffer-overlap", "write_through"),
    ("gdn", "replay-kv", "extra_buffer-overlap", "write_through"),
}


def hosted(
    case: Case, checkpoint, policy: str = "write_through", ratio: float = 4.0, copies: str | None = None, **changes
) -> EngineSpec:
    """The case's engine with a host tier of ``ratio`` times its own slots and tokens; ``copies`` names SGLang's backend
    of copies on a GPU."""
    extra = {"enable_hierarchical_cache": True, "hicache_ratio": ratio, "hicache_write_policy": policy}
    extra |= {} if copies is None else {"hicache_io_backend": copies}
    return case.spec(checkpoint(case.family), **{**FEW_SLOTS[case.cache], **changes}, extra=extra)


def conversations(vocab: int) -> list[Scenario]:
    return [scenarios.returning(vocab), scenarios.forks(vocab)]


def check_it_came_back(result: Result) -> None:
    """The run shows what it is to show: states have been copied both ways, for requests and for the radix cache, and
    where that disturbs nothing (`host.HostWatch`) they were looked at."""
    assert result.to_host > 0, "no state went to the host"
    assert result.from_host > 0, "no state came back from the host"
    if result.spec.device == "cpu":
        kinds = {record.kind for record in result.records}
        assert {"host", "loaded"} <= kinds, kinds
    assert ("radix rewind, " in result.log) == ("SGLANG_MAMBA_MTP_RADIX" in result.spec.env)


def _cases() -> list:
    params = []
    for (family, mode), policy in itertools.product(FAMILY_MODES, POLICIES):
        for cache in caches(mode):
            if policy == "write_through_selective" and cache.startswith("extra_buffer"):
                continue  # few states are hit twice there before they are evicted, and only those go to the host
            name = f"{family}-{mode}-{cache}-{policy}"
            wanted = marks(mode, (family, mode, cache, policy) in QUICK)
            params.append(pytest.param(Case(family, "nextn-chain", cache, mode), policy, id=name, marks=wanted))
    return params


@pytest.mark.in_turn
@pytest.mark.parametrize("case, policy", _cases())
def test_conversations_that_come_back_from_the_host(case, policy, checkpoint):
    todo = conversations(checkpoint.vocab)
    result = run(hosted(case, checkpoint, policy), todo)
    check_it_came_back(result)
    check_equal(result, todo)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ngram-tree", "nextn-tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees(family, algorithm, checkpoint):
    todo = conversations(checkpoint.vocab)
    result = run(hosted(Case(family, algorithm, "rewind", "replay"), checkpoint), todo)
    check_it_came_back(result)
    check_equal(result, todo)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", ["kernel", "direct"])
@pytest.mark.parametrize(
    "mode, cache", [("replay", "rewind"), ("replay", "extra_buffer-overlap"), ("slots", "no_buffer")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family, mode, cache, copies, checkpoint):
    """CUDA's copies, on streams of their own beside graphs and the next verify, with nothing that waits for them but
    SGLang and the plugin: what they leave is seen in the tokens, and in what the radix cache is given and has in the
    end."""
    todo = conversations(checkpoint.vocab)
    case = Case(family, "nextn-tree", cache, mode)
    changes = {"device": "cuda", "record_live": False, "timeout": 400.0}
    result = run(hosted(case, checkpoint, copies=copies, **changes), todo)
    assert result.graphs > 0
    check_it_came_back(result)
    check_equal(result, todo)


def test_the_next_turn_finds_on_the_host_what_it_would_on_the_device(checkpoint):
    """All of the turn before, but for the last token of its answer, which nobody has computed on."""
    todo = [scenarios.returning(checkpoint.vocab)]
    result = run(hosted(Case("gdn", "nextn-chain", "rewind", "replay"), checkpoint), todo)
    check_it_came_back(result)
    turns = result.outcomes
    found = {key: turn.cached_tokens for key, turn in turns.items() if not key.endswith("t0")}
    whole = {key: turns[_turn_before(key)] for key in found}
    for key, tokens in found.items():
        length = len(whole[key].prompt) + len(whole[key].tokens)
        assert length - 1 <= tokens <= length, key


def _turn_before(key: str) -> str:
    stem, turn = key[:-1], int(key[-1])
    return f"{stem}{turn - 1}"


# -- slots whose last owner left something behind --------------------------------------------------------------------


def _left() -> list:
    quick = {("replay", "rewind")}
    cells = [("replay", "rewind"), ("replay", "no_buffer"), ("slots", "no_buffer")]
    return [pytest.param(*cell, marks=marks(cell[0], cell in quick)) for cell in cells]


@pytest.mark.in_turn
@pytest.mark.parametrize("mode, cache", _left())
def test_what_is_loaded_owes_nothing_to_a_slots_last_owner(mode, cache, checkpoint):
    """Requests that are retracted leave their slots as they are, and states are loaded into those."""
    todo = [scenarios.returning(checkpoint.vocab)]
    case = Case("gdn", "nextn-chain", cache, mode)
    result = run(hosted(case, checkpoint, retract_every=5), todo)
    check_it_came_back(result)
    check_equal(result, todo)


# -- where nothing can be loaded, and where the host is full ---------------------------------------------------------


@pytest.mark.parametrize(
    "cache, mode",
    [
        pytest.param("rewind", "replay", id="rewind-replay"),
        pytest.param("extra_buffer-overlap", "slots", id="extra_buffer-slots", marks=pytest.mark.once),
        pytest.param("no_buffer", "snapshot", id="no_buffer-snapshot", marks=pytest.mark.slow),
    ],
)
def test_what_could_not_be_loaded_is_computed(cache, mode, checkpoint):
    """Two loads of three find no room on the device. The request then begins behind what the device has, with that
    prefix's state."""
    todo = conversations(checkpoint.vocab)
    case = Case("gdn", "nextn-chain", cache, mode)
    result = run(hosted(case, checkpoint, sabotage="seldom_loads"), todo)
    assert result.from_host > 0
    check_equal(result, todo)


@pytest.mark.parametrize("policy", [POLICIES[0], pytest.param(POLICIES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache", ["rewind", pytest.param("no_buffer", marks=pytest.mark.slow)])
def test_a_full_host_forgets_and_serves_on(policy, cache, checkpoint):
    """The host has room for half as many states as the device: what was there longest is forgotten, and computed again
    when somebody asks for it."""
    todo = [scenarios.returning(checkpoint.vocab)]
    result = run(hosted(Case("gdn", "nextn-chain", cache, "replay"), checkpoint, policy, ratio=0.5), todo)
    assert result.to_host > 2 * FEW_SLOTS[cache]["max_mamba_cache_size"], "the host was never full"
    check_equal(result, todo)


@pytest.mark.parametrize(
    "cache, mode",
    [
        ("rewind", "replay"),
        pytest.param("no_buffer", "replay", marks=pytest.mark.slow),
        pytest.param("no_buffer", "snapshot", marks=pytest.mark.slow),
    ],
)
def test_a_slow_host_is_not_waited_for(cache, mode, checkpoint):
    """What is being copied to the host cannot be evicted. Where slots run short nothing more is sent there."""
    todo = [scenarios.returning(checkpoint.vocab)]
    result = run(hosted(Case("gdn", "nextn-chain", cache, mode), checkpoint, sabotage="slow_host"), todo)
    assert result.to_host > 0
    check_equal(result, todo)


# -- the tests bite --------------------------------------------------------------------------------------------------


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "fault, cache, mode, changes",
    [
        pytest.param("skip_leaving", "rewind", "replay", {}, id="a slot is copied to the host before it is cut back"),
        pytest.param(
            "skip_leaving", "no_buffer", "slots-kv", {}, id="or in the other axis order", marks=pytest.mark.once
        ),
        pytest.param("skip_arriving", "rewind", "replay", {"retract_every": 5}, id="a slot keeps its pending tokens"),
        pytest.param(
            "skip_arriving",
            "no_buffer",
            "slots",
            {"retract_every": 5},
            id="or its draft slot",
            marks=pytest.mark.once,
        ),
        pytest.param("starts_from_anything", "rewind", "replay", {}, id="a prefix without its state"),
    ],
)
def test_a_fault_is_seen(fault, cache, mode, changes, checkpoint):
    todo = [(scenarios.forks if fault == "starts_from_anything" else scenarios.returning)(checkpoint.vocab)]
    result = run(hosted(Case("gdn", "nextn-tree", cache, mode), checkpoint, sabotage=fault, **changes), todo)
    with pytest.raises(AssertionError, match="differ"):
        check_equal(result, todo)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["falcon_h1", "granite4"])
def test_other_mamba2_models(model, written, checkpoint):
    """Those whose every layer has something to copy; Nemotron-H, the tests' own, has layers between that have not."""
    todo = [scenarios.returning(checkpoint.vocab)]
    case = Case("mamba2", "ngram-tree", "rewind", "replay")
    result = run(hosted(case, lambda family: written(model)), todo)
    check_it_came_back(result)
    check_equal(result, todo)
