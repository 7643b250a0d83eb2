"""The state comparison itself: it must see what it is for, and reading must not change a pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from .states import Record, State, as_prefix, as_tokens, compare, read_state, relative_error


def _pool(slots: int = 5):
    cache = SimpleNamespace(temporal=torch.randn(3, slots, 2, 4, 4), conv=[torch.randn(3, slots, 6, 3)])
    return SimpleNamespace(mamba_cache=cache)


class _ReplayPool:
    """A stand-in with pending tokens: settling adds their count to the checkpoint."""

    def __init__(self):
        self.mamba_cache = _pool().mamba_cache
        pending = torch.tensor([0, 2, 0, 3, 0], dtype=torch.int32)
        self.store = SimpleNamespace(pending=pending, bookkeeping=(pending,), settle=self._settle)
        self.axis_orders = SimpleNamespace(bits=torch.zeros(5, dtype=torch.uint8))

    def _settle(self, slots):
        self.mamba_cache.temporal[:, slots] += self.store.pending[slots].view(1, -1, 1, 1, 1)
        self.store.pending[slots] = 0


def test_prefix_round_trip():
    tokens = [0, 5, 2**40, 7]
    assert as_tokens(as_prefix(tokens)) == tokens
    assert as_prefix([1, 2]) != as_prefix([2, 1])


def test_relative_error_is_per_layer_and_sees_every_part():
    (state,) = read_state(_pool(), torch.tensor([2]), settle=False)
    assert relative_error(state, state) == 0
    temporal, conv = state.temporal.clone(), state.conv[0].clone()
    temporal[1] *= 1 + 1e-3
    assert relative_error(State(temporal, state.conv), state) == pytest.approx(1e-3, rel=1e-2)
    conv[2] += conv[2] * 1e-2
    assert relative_error(State(state.temporal, (conv,)), state) == pytest.approx(1e-2, rel=1e-2)
    temporal[0, 0, 0, 0] = float("nan")
    assert relative_error(State(temporal, state.conv), state) == float("inf")


def test_compare_names_the_offender_and_demands_a_reference():
    (state,) = read_state(_pool(), torch.tensor([1]), settle=False)
    other = State(state.temporal * 1.1, state.conv)
    records = [Record("decode", "r1@4", as_prefix([1, 2, 3]), other), Record("radix", "slot 2", as_prefix([9]), state)]
    result = compare(records, {as_prefix([1, 2, 3]): state}, bound=1e-5)
    assert [line.split(":")[0] for line in result.bad] == ["decode r1@4 [3 tokens]", "radix slot 2 [1 tokens]"]
    with pytest.raises(AssertionError, match="no reference state"):
        result.check()


def test_reading_settles_without_changing_the_pool():
    pool = _ReplayPool()
    temporal, pending = pool.mamba_cache.temporal.clone(), pool.store.pending.clone()
    got = read_state(pool, torch.tensor([1, 2, 3]), settle=True)
    for state, slot, count in zip(got, (1, 2, 3), (2, 0, 3), strict=True):
        torch.testing.assert_close(state.temporal, temporal[:, slot] + count)
    assert torch.equal(pool.mamba_cache.temporal, temporal)
    assert torch.equal(pool.store.pending, pending)
    (raw,) = read_state(pool, torch.tensor([3]), settle=False)
    assert torch.equal(raw.temporal, temporal[:, 3])


def test_a_slot_in_the_other_layout_is_read_as_the_same_state():
    pool = _ReplayPool()
    (plain,) = read_state(pool, torch.tensor([2]), settle=False)
    cache = pool.mamba_cache
    cache.temporal[:, 2] = cache.temporal[:, 2].transpose(-1, -2).clone()
    pool.axis_orders.bits[2] = 1
    (turned,) = read_state(pool, torch.tensor([2]), settle=False)
    assert torch.equal(turned.temporal, plain.temporal)
