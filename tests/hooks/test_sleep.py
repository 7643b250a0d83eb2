"""Which kinds of memory that come back from sleep concern the pool."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from sglang_mamba_mtp.hooks import sleep


@pytest.mark.parametrize(
    ("tags", "renewed"),
    [
        (None, True),
        ([], True),
        (["kv_cache"], True),
        (["weights", "kv_cache"], True),
        (["weights", "cuda_graph"], False),
    ],
)
def test_what_came_back(sglang, tags, renewed):
    from sglang_mamba_mtp.state.pools import ReplayPool

    pool = mock.create_autospec(ReplayPool, instance=True, device="cpu")
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=pool))
    sleep.wake("result", SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)), SimpleNamespace(tags=tags))
    assert pool.renew.called == renewed


def test_other_pools_are_left_alone(sglang):
    """Dense models, and models that the mode has no backend for."""
    for pool in (SimpleNamespace(), SimpleNamespace(mamba_pool=SimpleNamespace())):
        updater = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool)))
        assert sleep.wake("result", updater, SimpleNamespace(tags=None)) is None
