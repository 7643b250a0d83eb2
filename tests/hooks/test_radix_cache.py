"""What is cached when a request ends, where only some SGLang versions ask themselves (the engine tests run two)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp.hooks import radix_cache, rewind
from tests.devices import on_device, watch


def _request(committed: int, key: int, name: str, *, ended: bool = True) -> SimpleNamespace:
    """A request whose key is ``key`` of its ``committed`` tokens; ``name`` is what its version calls that."""
    lengths = {"kv_committed_len": committed} if name == "effective_kv_committed_len" else {}
    kv = SimpleNamespace(kv_committed_len=committed)
    return SimpleNamespace(
        **lengths, **{name: lambda: key}, kv=kv, finished=lambda: ended, skip_radix_cache_insert=False
    )


def _cache(*, mamba: bool = True, buffer: bool = False) -> SimpleNamespace:
    return SimpleNamespace(supports_mamba=lambda: mamba, enable_mamba_extra_buffer=buffer)


@pytest.mark.parametrize("name", ["owned_kv_len", "effective_kv_committed_len"])
def test_a_state_that_cannot_be_cut_back_is_not_cached(name):
    """In 0.5.22 an answer that stops inside an accepted run has a key that ends with the stop, and a state that does
    not."""
    for request, cache, kept in (
        (_request(20, 20, name), _cache(), True),
        (_request(20, 18, name), _cache(), False),
        (_request(20, 18, name), _cache(buffer=True), True),  # a snapshot is cached, which SGLang chooses by the key
        (_request(20, 18, name), _cache(mamba=False), True),
        (_request(20, 18, name, ended=False), _cache(), True),
    ):
        radix_cache.cache_no_state_past_its_key(request, cache, checkpoint=True)
        assert request.skip_radix_cache_insert is not kept


def _verified(tracked: list[int | None], pool: object = None) -> SimpleNamespace:
    """A batch before its verify: which of its two slots each request tracks into, None for one that has ended."""
    reqs = [SimpleNamespace(mamba_ping_pong_track_buffer=None, mamba_next_track_idx=slot) for slot in tracked]
    indices = on_device(torch.arange(11, 11 + len(tracked)))
    return SimpleNamespace(reqs=reqs, mamba_track_indices=indices, req_to_token_pool=pool)


@pytest.mark.parametrize(
    ("tracked", "left"), [((0, 1, 0), [11, 12, 13]), ((None, 1, None), [-1, 12, -1]), ((None,), [-1])]
)
def test_nothing_is_tracked_into_freed_slots(tracked, left):
    """And the draft, which is at work meanwhile, is not waited for."""
    batch = _verified(list(tracked))
    with watch() as reads:
        radix_cache.track_only_into_own_snapshots(None, batch)
    assert not reads
    assert batch.mamba_track_indices.as_subclass(torch.Tensor).tolist() == left


@pytest.mark.gpu
def test_freed_slots_are_sent_without_a_wait():
    """The real thing: CUDA itself raises on any synchronising call."""
    batch = _verified([None, 1, None])
    batch.mamba_track_indices = torch.arange(11, 14).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        radix_cache.track_only_into_own_snapshots(None, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.mamba_track_indices.tolist() == [-1, 12, -1]


def test_where_states_are_rewound_a_verify_looks_nothing_up(sglang):
    """Its requests hold no snapshot slots: as if all of them had ended, every step."""
    from sglang_mamba_mtp.state.rewind import RewindRequests

    asked: list[int] = []

    def look_up(batch, track_positions=None):
        asked.append(len(batch.reqs))

    ours = _verified([None] * 3, object.__new__(RewindRequests))
    others = _verified([0, 1])
    for batch in (ours, others):
        rewind.track_nothing_in_a_verify(look_up, batch, None)
        radix_cache.track_only_into_own_snapshots(None, batch)
    assert asked == [2]
    assert ours.mamba_track_indices is None and others.mamba_track_indices is not None


@pytest.mark.parametrize("mask", [None, "of the batch"])
def test_a_prefill_in_a_batch_that_tracks_nothing_has_no_snapshot(mask):
    """And what the requests that decode in it have had snapshots of before stays."""
    prefills, tails = ([SimpleNamespace(mamba_last_track_seqlen=64) for _ in range(2)] for _ in range(2))
    for each in (*prefills, *tails):
        each.mamba_ping_pong_track_buffer = None
    batch = SimpleNamespace(reqs=[*prefills, *tails], mamba_track_mask=mask)
    radix_cache.forget_snapshots_that_mixing_drops(None, batch, SimpleNamespace(batch_size=lambda: 2))
    kept = None if mask is None else 64
    assert [each.mamba_last_track_seqlen for each in batch.reqs] == [kept, kept, 64, 64]
