"""What is cached when a request ends, where only some SGLang versions ask themselves (the engine tests run two)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_mamba_mtp.hooks import radix_cache


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
