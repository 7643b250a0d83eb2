"""What is counted on the device, and that nothing waits for it in a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp.metrics.reading import Reading
from sglang_mamba_mtp.state.counts import COUNTED, Counts

from ..devices import DEVICE, OnDevice, on_device, watch

pytestmark = pytest.mark.usefixtures("sglang")

NODES, THRESHOLD = 4, 5


@pytest.fixture(params=["replay", "slots"])
def pool(request, sglang):
    """A pool on the CPU, counting."""
    from tests.stateful import naive, test_lives

    model = naive.MODELS["gdn"](naive.Sizes(), torch.Generator().manual_seed(0))
    pools = {
        "replay": lambda: test_lives.replay_pool(model, THRESHOLD, "vk"),
        "slots": lambda: test_lives.slots_pool(model, "vk"),
    }
    pool = pools[request.param]()
    pool.store.counts = Counts(torch.device("cpu"))
    return pool


def verify_and_commit(store, slots: list[int], rows: list[int], accepted: list[int]) -> None:
    """A chain's commit of ``accepted`` nodes a row; what a verify writes into windows does not matter here."""
    from sglang_mamba_mtp.state.store import VerifyBatch
    from tests.stateful import naive

    batch = VerifyBatch(torch.tensor(slots), torch.tensor(rows), torch.tensor(rows), NODES, True)
    store.prepare(batch, None, None)
    dim, entries = store.conv_states.shape[2:]
    x, weight = torch.zeros(batch.size * NODES, dim), torch.zeros(dim, entries + 1)
    model = naive.MODELS["gdn"](naive.Sizes(), torch.Generator().manual_seed(0))
    store.convolve(0, x, batch, parts=model.parts, weight=weight, bias=None, activation=None)
    store.commit(batch, last_correct=torch.tensor(accepted) - 1, track_slots=None, steps_to_track=None)


def counted(store) -> dict[str, int]:
    return dict(zip(COUNTED, store.counts.values.tolist(), strict=True))


def test_folds_and_settles_are_those_that_happen(pool):
    """Against a count by hand: a verify folds what is past the threshold, settling folds the rest, padding nothing."""
    store = pool.store
    replay = hasattr(store, "pending")
    slots, rows = [3, 5, -1], [1, 2, 0]
    pending, folds, folded = {3: 0, 5: 0}, 0, 0
    for step in range(12):
        accepted = [1 + step % NODES, 1 + (step * 3 + 1) % NODES, 1]
        for slot, count in zip(slots[:2], accepted, strict=False):
            if pending[slot] > THRESHOLD:
                folds, folded, pending[slot] = folds + 1, folded + pending[slot], 0
            pending[slot] += count
        verify_and_commit(store, slots, rows, accepted)
    assert folds > 4
    expected = {"folds": folds, "folded_tokens": folded} if replay else {"folds": 0, "folded_tokens": 0}
    assert counted(store) == {**expected, "settles": 0, "settled_tokens": 0}
    pool.settle(torch.tensor([5, 7, -1, 0]))
    assert counted(store)["settles"] == 1 and counted(store)["settled_tokens"] == (pending[5] if replay else 0)
    pool.settle(torch.tensor([5]))  # nothing left
    assert counted(store)["settles"] == 1


def test_counting_never_reads_the_device():
    with watch() as reads:
        counts = Counts(torch.device("cpu"))
        counts.values = on_device(counts.values)
        pending = torch.arange(8, dtype=torch.int32, device=DEVICE)
        slots = torch.tensor([2, 7, -1], dtype=torch.int32, device=DEVICE)
        counts.folds(pending[6:] * torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
        counts.settles(pending.index_select(0, slots.clamp(min=0)))
        counts.moves(slots + 1, slots)
        assert isinstance(counts.values, OnDevice) and reads == []
    assert counts.values.tolist() == [1, 7, 2 + 2, 9]


def test_a_reading_is_what_was_asked_for_before(monkeypatch):
    """While a copy is under way neither the host waits nor is another one started."""
    arrived = [False]
    event = SimpleNamespace(record=lambda: None, query=lambda: arrived[0])
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=lambda: event))
    reading = Reading(2, torch.device("cpu"))
    reading._on_device = True
    assert reading.newest() is None
    reading.request(torch.tensor([1, 2]))
    assert reading.newest() is None
    reading.request(torch.tensor([3, 4]))
    arrived[0] = True
    assert reading.newest() == [1, 2]
    reading.request(torch.tensor([5, 6]))
    assert reading.newest() == [5, 6]


def test_on_a_cpu_a_reading_is_there_at_once():
    reading = Reading(2, torch.device("cpu"))
    reading.request(torch.tensor([1, 2]))
    assert reading.newest() == [1, 2]


def observer(pool, *, metrics: bool, monkeypatch):
    """An `Observer` of a scheduler with two running requests, on the pretend device."""
    from prometheus_client import CollectorRegistry, Counter, Gauge

    from sglang_mamba_mtp.metrics import observer as module
    from sglang_mamba_mtp.metrics.facts import Facts

    registry = CollectorRegistry()

    class Collector:
        _gauge_cls = staticmethod(lambda **settings: Gauge(**settings, registry=registry))
        _counter_cls = staticmethod(lambda **settings: Counter(**settings, registry=registry))
        labels = {"model_name": "m", "tp_rank": 0}  # noqa: RUF012

    requests = SimpleNamespace(
        mamba_pool=pool,
        req_to_token=torch.zeros(4, 8, dtype=torch.int32),
        get_mamba_indices=lambda rows: torch.tensor([0, 3, 5, 0], device=DEVICE)[rows],
    )
    runner = SimpleNamespace(req_to_token_pool=requests, server_args=None)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        running_batch=SimpleNamespace(
            reqs=[SimpleNamespace(seqlen=100)] * 2, req_pool_indices=torch.tensor([1, 2], device=DEVICE)
        ),
    )
    monkeypatch.setattr(module, "step_model", lambda runner, facts: None)
    monkeypatch.setattr(module, "drafting_of", lambda server_args: None)
    reporter = SimpleNamespace(
        scheduler=scheduler,
        is_stats_logging_rank=True,
        current_scheduler_metrics_enabled=metrics,
        metrics_collector=Collector() if metrics else None,
    )
    facts = Facts("replay", "GDN", {"windows": 7}, 20, 3, 10, 6, 2, 3, 2, "rewind")
    pool.store.counts = None
    return module.Observer(reporter, facts), registry


def test_publishing_never_waits_and_tells_what_is_pending(pool, monkeypatch):
    with watch() as reads:
        watching, registry = observer(pool, metrics=True, monkeypatch=monkeypatch)
        store = pool.store
        replay = hasattr(store, "pending")
        if replay:
            store.pending = on_device(store.pending)
        verify_and_commit(store, [3, 5], [1, 2], [2, 4])
        reads.clear()  # the references that stand in for kernels here do read
        values = watching._on_device()
        assert reads == []
        watching._reading.request(values)
    watching.publish()

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"sglang_mamba_mtp_{name}", {"model_name": "m", "tp_rank": "0"})

    assert value("pending_tokens") == (6 if replay else None)
    assert value("pending_tokens_max") == (4 if replay else None)
    assert value("window_tokens") == (THRESHOLD + NODES if replay else None)
    assert value("folds_total") == 0
    assert value("saved_bytes") == 13 and value("memory_request_limit") == 2
    watching.stepped()
    watching.stepped()
    watching.interval(6, 15)
    assert value("accept_length") == 2.5 and value("verify_batch") == 3
    watching.interval(2, 2)
    assert value("verifies_total") == 8 and value("committed_tokens_total") == 17


def test_without_metrics_nothing_is_counted(pool, monkeypatch):
    watching, _ = observer(pool, metrics=False, monkeypatch=monkeypatch)
    assert pool.store.counts is None
    verify_and_commit(pool.store, [3, 5], [1, 2], [2, 4])
    pool.settle(torch.tensor([3]))
    watching.publish()
    assert "folds" not in watching.report() and watching.report()["running_requests"] == 2
