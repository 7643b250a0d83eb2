"""move_states: copies of whole slots, compared bit for bit."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common import move, ops_for
from mamba_mtp_kernels.common.move import move_states
from mamba_mtp_kernels.common.reference import move_states_reference

from ..helpers import assert_same_bits

OPS = [pytest.param(move_states, id="kernel"), pytest.param(move_states_reference, id="reference")]

#: (src, dst): two that move, and every reason not to
PAIRS = [(3, 1), (0, 2), (4, 0), (-1, 5), (6, -1), (7, 7), (2, 8), (-1, -1)]


def run(op, device, buffer, pairs, take=lambda buffer: buffer, dtype=torch.int64):
    """op on a copy of `buffer`, through the view `take` of it; returns the whole buffer."""
    buffer = buffer.clone().to(device)
    src, dst = (torch.tensor(column, dtype=dtype, device=device) for column in zip(*pairs, strict=True))
    op(take(buffer), src_slots=src, dst_slots=dst)
    return buffer.cpu()


def expected_pool(buffer, pairs, take=lambda buffer: buffer):
    expected = buffer.clone()
    for src, dst in pairs:
        if src > 0 and dst > 0:
            for layer in range(take(buffer).shape[0]):
                take(expected)[layer, dst] = take(buffer)[layer, src]
    return expected


def poisoned(*shape, dtype=torch.float32):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[..., 0], values[..., -1] = float("nan"), -0.0
    return values


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inner", [(2, 16, 24), (7, 3), (5,), (3, 5000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_the_rule(op, inner, dtype, device):
    buffer = poisoned(2, 9, *inner, dtype=dtype)
    assert_same_bits("states", run(op, device, buffer, PAIRS), expected_pool(buffer, PAIRS))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides_and_index_dtypes(op, dtype, device):
    """Slots with gaps, every other layer: what lies between is left alone."""
    buffer = poisoned(4, 9, 35)

    def take(whole):
        return whole[::2, :, :30].unflatten(2, (5, 6))

    actual = run(op, device, buffer, PAIRS, take, dtype)
    assert_same_bits("states", actual, expected_pool(buffer, PAIRS, take))


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_move(op, device):
    buffer = poisoned(2, 9, 6)
    for pairs in ([(0, 1), (2, 2), (5, -1)], [(-1, -1)] * 5):
        assert_same_bits("states", run(op, device, buffer, pairs), buffer)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    op(buffer.to(device), src_slots=empty, dst_slots=empty)


def test_more_blocks_than_programs(device, monkeypatch):
    monkeypatch.setattr(move, "PROGRAMS", 4)
    monkeypatch.setattr(move, "BLOCK_BYTES", 64)
    buffer = poisoned(3, 9, 100)
    assert_same_bits("states", run(move_states, device, buffer, PAIRS), expected_pool(buffer, PAIRS))


def test_errors_name_the_argument(device):
    states = torch.zeros(1, 3, 4, 6, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"states: shape \(3, 4\)"):
        move_states(states[0, :, :, 0], src_slots=one, dst_slots=one)
    with pytest.raises(ValueError, match="last 2 must be contiguous"):
        move_states(states.transpose(2, 3), src_slots=one, dst_slots=one)
    with pytest.raises(ValueError, match="dst_slots"):
        move_states(states, src_slots=one, dst_slots=one[:0])


def test_ops_for():
    assert ops_for("cpu").move_states is move_states_reference
    assert ops_for("cuda").move_states is move_states


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [(32, 128, 128), (8192, 3), (80, 64, 17)], ids=str)
def test_real_sizes(inner, dtype):
    states = torch.randn(8, 40, *inner, device="cuda").to(dtype)
    order = 1 + torch.randperm(39, generator=torch.Generator().manual_seed(0)).cuda()
    src, dst = order[:18].clone(), order[18:36].clone()
    src[3], dst[5], src[7] = -1, 0, dst[7]
    actual, expected = states.clone(), states.clone()
    move_states(actual, src_slots=src, dst_slots=dst)
    move_states_reference(expected, src_slots=src, dst_slots=dst)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, states)
