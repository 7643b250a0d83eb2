"""The harness fails loudly: dead, hanging and unhooked engines, and faults in the committed states."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from . import child, gpu_engines, scenarios
from .harness import STATE_BOUND, EngineError, baseline, reference_states, run, token_differences
from .matrix import EVERYWHERE, FAMILIES, FEW_SLOTS, IN_FULL, MODES, Case, in_modes, marks
from .scenario import Request, Scenario
from .states import compare

OWN = in_modes(IN_FULL, FAMILIES)
"""Where states are the plugin's own to keep."""

EVERY = in_modes(MODES["gdn"], ["gdn"]) + in_modes(MODES["mamba2"], ["mamba2"])

ONE_LAYOUT = [
    *in_modes([mode for mode in MODES["gdn"] if not mode.endswith("-kv")], FAMILIES),
    *(pytest.param("gdn", mode, marks=pytest.mark.slow) for mode in MODES["gdn"] if mode.endswith("-kv")),
]
"""A commit is a mode's: its layouts share it, and are looked at with ``--slow``."""

ONE = Scenario("one", (Request("r", (5, 6, 7, 5, 6, 7, 5, 6), 8),))


def test_dead_engine(checkpoint):
    spec = Case("gdn", "ngram-tree", "no_buffer", "snapshot").spec(checkpoint("gdn"), sabotage="die")
    with pytest.raises(EngineError, match=r"(?s)exit code 3.*last words"):
        run(spec, [ONE])


def test_hanging_engine(checkpoint):
    spec = Case("gdn", "ngram-tree", "no_buffer", "snapshot").spec(checkpoint("gdn"), sabotage="hang", timeout=3)
    with pytest.raises(EngineError, match="no result within 3 s"):
        run(spec, [ONE])


def test_engine_that_raises(checkpoint):
    spec = Case("gdn", "ngram-tree", "no_buffer", "snapshot").spec(checkpoint("gdn"), extra={"model_path": "/nowhere"})
    with pytest.raises(EngineError, match=r"(?s)Error: .*/nowhere.*last lines of its log.*/nowhere"):
        run(spec, [ONE])


def test_plugin_that_does_not_load(checkpoint, sglang_version, monkeypatch):
    """Engines of a mode are forked from one process that has loaded the plugin: it says why it could not."""
    from sglang.srt import plugins

    def broken():
        raise RuntimeError("no such plugin")

    monkeypatch.setattr(plugins, "load_plugins", broken)
    spec = Case("gdn", "ngram-tree", "no_buffer", "replay").spec(checkpoint("gdn"), env={"FORKED_FROM": "its own"})
    with pytest.raises(EngineError, match=r"(?s)the plugin was not loaded.*no such plugin"):
        run(spec, [ONE])


@pytest.mark.parametrize("lost", ["KV tokens", "state slots", "request rows"])
def test_what_does_not_come_back_is_seen(sglang_version, lost):
    """Of an idle scheduler whose cache has been evicted; every engine run ends with this."""
    free = {"KV tokens": 90, "state slots": 9, "request rows": 4}

    def kind(name: str):
        return SimpleNamespace(available_size=lambda: free[name])

    rows = SimpleNamespace(available_size=lambda: free["request rows"], mamba_allocator=kind("state slots"))
    cache = SimpleNamespace(evict=lambda params: None)
    scheduler = SimpleNamespace(req_to_token_pool=rows, token_to_kv_pool_allocator=kind("KV tokens"), tree_cache=cache)
    before = child.free_counts(scheduler)
    child.check_nothing_is_lost(scheduler, before)
    free[lost] -= 1
    with pytest.raises(AssertionError, match="free before any request"):
        child.check_nothing_is_lost(scheduler, before)


@pytest.mark.parametrize("mode", MODES["gdn"])
def test_hooks_that_are_not_live(checkpoint, mode):
    spec = Case("gdn", "ngram-tree", "no_buffer", mode).spec(checkpoint("gdn"), sabotage="unhook_commit")
    with pytest.raises(EngineError, match="not live"):
        run(spec, [ONE])


def _sabotaged(checkpoint, case: Case, fault: str, make=scenarios.turns, **changes):
    """A faulty run of one scenario: per kind of record, how its states compare."""
    todo = [make(checkpoint.vocab)]
    result = run(case.spec(checkpoint(case.family), sabotage=fault, **changes), todo)
    changed = token_differences(result, baseline(result.spec, todo))
    print(f"; tokens differ in {len(changed)} of {len(result.outcomes)} requests", end="")
    # A state is wrong before the text is: the reference has the prefixes up to there, and the rest needs no comparing.
    known = reference_states(result.spec, [])
    kinds = {}
    for kind in ("prefill", "decode", "insert", "radix"):
        records = [record for record in result.records if record.kind == kind and record.prefix in known]
        kinds[kind] = compare(records, known, STATE_BOUND)
        print(f"; {kind}: {len(kinds[kind].bad)} of {len(records)} states differ", end="")
    return kinds


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_a_commit_of_the_root_alone_is_seen(checkpoint, family, mode):
    kinds = _sabotaged(checkpoint, Case(family, "ngram-tree", "no_buffer", mode), "commit_root")
    assert kinds["decode"].worst > 1000 * STATE_BOUND


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), ONE_LAYOUT)
def test_a_commit_of_one_less_is_seen(checkpoint, family, mode):
    kinds = _sabotaged(checkpoint, Case(family, "ngram-tree", "no_buffer", mode), "commit_one_less")
    assert kinds["decode"].worst > 1000 * STATE_BOUND


def _where_snapshots_are_taken() -> list:
    """Every mode under one strategy, and every strategy in one mode; the rest with ``--slow``."""
    caches = ("extra_buffer", "extra_buffer-overlap", "extra_buffer_lazy")
    params = []
    for cache, family, mode in itertools.product(caches, FAMILIES, MODES["gdn"]):
        if family == "mamba2" and mode not in IN_FULL:
            continue
        quick = cache == "extra_buffer-overlap" or (family, mode) == ("gdn", EVERYWHERE)
        params.append(pytest.param(cache, family, mode, id=f"{cache}-{family}-{mode}", marks=marks(mode, quick)))
    return params


@pytest.mark.in_turn
@pytest.mark.parametrize(("cache", "family", "mode"), _where_snapshots_are_taken())
def test_wrong_snapshot_is_seen(checkpoint, cache, family, mode):
    kinds = _sabotaged(checkpoint, Case(family, "nextn-chain", cache, mode), "track_root")
    assert kinds["insert"].worst > 1000 * STATE_BOUND


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), OWN)
def test_skipped_settle_is_seen(checkpoint, family, mode):
    kinds = _sabotaged(checkpoint, Case(family, "ngram-tree", "no_buffer", mode), "skip_settle")
    assert kinds["insert"].worst > 1000 * STATE_BOUND


@pytest.mark.parametrize("mode", in_modes(IN_FULL))
def test_what_was_known_of_a_recycled_slot_is_seen(checkpoint, mode):
    """A stale pending count, or an index into draft slots that are another request's. GDN: with Mamba2's model 0.5.17
    recycles no slot here whose former owner left something behind; the stateful tests do it for both families."""
    case = Case("gdn", "ngram-tree", "no_buffer", mode)
    kinds = _sabotaged(checkpoint, case, "skip_discard", scenarios.pressure, **FEW_SLOTS["no_buffer"])
    assert max(kind.worst for kind in kinds.values()) > 1000 * STATE_BOUND


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "fault"), [("replay-kv", "stale_layout"), ("slots-kv", "unturned")])
def test_wrong_layout_bit_is_seen(checkpoint, mode, fault, family):
    kinds = _sabotaged(checkpoint, Case(family, "ngram-tree", "extra_buffer", mode), fault)
    assert max(kind.worst for kind in kinds.values()) > 1000 * STATE_BOUND


def test_what_is_asked_of_one_gpu_engine_has_a_name_each():
    """Cells of several kinds share a plain engine, which is asked what each of them is asked."""
    cells = [
        gpu_engines.Cell(Case("gdn", "nextn-chain", "no_buffer", "replay"), kind=kind) for kind in gpu_engines.KINDS
    ]
    asked = {scenario for cell in cells for scenario in gpu_engines._todo(cell, 704)}
    assert len({scenario.name for scenario in asked}) == len(asked)
