"""Which kinds of memory that are given back and taken again concern the pool."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_mamba_mtp.hooks import sleep

TAGS = [
    (None, True),
    ([], True),
    (["kv_cache"], True),
    (["weights", "kv_cache"], True),
    (["weights", "cuda_graph"], False),
]


def updater_of(pool) -> SimpleNamespace:
    runner = SimpleNamespace(req_to_token_pool=pool, device="cpu")
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


@pytest.fixture
def pool(sglang):
    from sglang_mamba_mtp.state.pools import ReplayPool

    return mock.create_autospec(ReplayPool, instance=True, device="cpu")


@pytest.mark.parametrize(("tags", "renewed"), TAGS)
def test_what_came_back(pool, tags, renewed):
    sleep.wake("result", updater_of(SimpleNamespace(mamba_pool=pool)), SimpleNamespace(tags=tags))
    assert pool.renew.called == renewed


@pytest.mark.parametrize(("tags", "waited"), TAGS)
def test_what_is_given_back_is_waited_for(sglang, tags, waited, monkeypatch):
    """Whosever the pool is: SGLang's verify works on it just so."""
    done = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=done))
    sleep.fall_asleep(updater_of(SimpleNamespace()), SimpleNamespace(tags=tags))
    assert done.called == waited


def test_other_pools_are_left_alone(sglang):
    """Dense models, and models that the mode has no backend for."""
    for pool in (SimpleNamespace(), SimpleNamespace(mamba_pool=SimpleNamespace())):
        assert sleep.wake("result", updater_of(pool), SimpleNamespace(tags=None)) is None
