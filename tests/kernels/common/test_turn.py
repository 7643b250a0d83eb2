"""turn_states: a transposition in place, of flagged slots only. Copies, so compared bit for bit."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common import ops_for
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.common.reference import turn_states_reference
from mamba_mtp_kernels.common.turn import turn_states

from ..helpers import assert_same_bits

OPS = [pytest.param(turn_states, id="kernel"), pytest.param(turn_states_reference, id="reference")]


def pool(values, keys, *, layers=2, slot_count=7, heads=3, dtype=torch.float32, gap=0, seed=0):
    """states [layers, slot_count, heads, values, keys], slots `gap` NaN elements apart."""
    generator = torch.Generator().manual_seed(seed)
    inner = heads * values * keys
    flat = torch.full((layers, slot_count, inner + gap), float("nan"), dtype=dtype)
    flat[..., :inner] = torch.randn(layers, slot_count, inner, generator=generator)
    # bits a conversion would change
    flat[:, 1:, 0], flat[:, 1:, 1] = float("nan"), -0.0
    return flat


def view(flat, heads, values, keys):
    return flat[..., : heads * values * keys].unflatten(-1, (heads, values, keys))


def turned(state, to):
    """One slot's [HV, V, K] elements brought into the other order, head by head."""
    heads, values, keys = state.shape
    rows, columns = (values, keys) if to == KV else (keys, values)
    flat = state.reshape(heads, -1)
    out = torch.empty_like(flat)
    for head in range(heads):
        for row in range(rows):
            out[head, row::rows] = flat[head, row * columns : (row + 1) * columns]
    return out.reshape(heads, values, keys)


def run(op, device, flat, bits, slots, to, shape, dtype=torch.int64):
    """op on copies; returns the whole buffer and the bits."""
    flat, bits = flat.clone().to(device), torch.tensor(bits, dtype=torch.uint8, device=device)
    op(view(flat, *shape), bits, slots=torch.tensor(slots, dtype=dtype, device=device), to=to)
    return flat.cpu(), bits.tolist()


def expected_pool(flat, bits, slots, to, shape):
    flat, bits = flat.clone(), list(bits)
    for slot in slots:
        if slot > 0 and bits[slot] != to:
            for layer in range(flat.shape[0]):
                state = view(flat, *shape)[layer, slot]
                state.copy_(turned(state.clone(), to))
            bits[slot] = to
    return flat, bits


SHAPES = [(16, 16), (64, 128), (128, 64), (80, 48), (24, 256), (128, 16), (33, 40)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("to", [VK, KV])
@pytest.mark.parametrize("values, keys", SHAPES)
def test_matches_the_rule(op, to, values, keys, device):
    shape = (3, values, keys)
    flat = pool(values, keys)
    bits, slots = [KV, VK, KV, VK, KV, VK, KV], [2, 0, 1, -1, 5, 4]
    actual, actual_bits = run(op, device, flat, bits, slots, to, shape)
    expected, expected_bits = expected_pool(flat, bits, slots, to, shape)
    assert_same_bits("states", actual, expected)
    assert actual_bits == expected_bits
    assert expected_bits[0] == KV and expected_bits[3] == VK and expected_bits[6] == KV, "slots not asked for"
    unasked = [slot for slot in range(7) if slot not in slots or bits[slot] == to]
    assert_same_bits("slots left alone", actual[:, unasked], flat[:, unasked])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_twice_is_the_identity(op, dtype, index_dtype, device):
    shape = (3, 40, 24)
    flat = pool(40, 24, dtype=dtype, gap=5)
    slots = [3, 1, 6]
    once, bits = run(op, device, flat, [VK] * 7, slots, KV, shape, index_dtype)
    assert bits == [VK, KV, VK, KV, VK, VK, KV]
    assert not torch.equal(once[:, slots].nan_to_num(), flat[:, slots].nan_to_num())
    again, bits = run(op, device, once, bits, slots, VK, shape, index_dtype)
    assert bits == [VK] * 7
    assert_same_bits("states and the gaps between slots", again, flat)


@pytest.mark.parametrize("op", OPS)
def test_reads_as_k_v(op, device):
    """What the word KV promises to the kernels that read it."""
    shape = (2, 16, 24)
    flat = pool(16, 24, heads=2)
    actual, _ = run(op, device, flat, [VK] * 7, [2], KV, shape)
    before, after = view(flat, *shape)[0, 2], view(actual, *shape)[0, 2].reshape(2, 24, 16)
    assert_same_bits("state", after, before.transpose(1, 2).contiguous())


@pytest.mark.parametrize("op", OPS)
def test_head_stride(op, device):
    """Heads that do not follow each other: only each head has to be contiguous."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(2, 3, 4, 2, 16, 24, generator=generator)
    states = wide[:, :, :, 0]
    bits = torch.tensor([VK, VK, VK], dtype=torch.uint8, device=device)
    on_device = wide.clone().to(device)
    op(on_device[:, :, :, 0], bits, slots=torch.tensor([1], device=device), to=KV)
    expected = wide.clone()
    expected[:, 1, :, 0] = states[:, 1].transpose(2, 3).reshape(2, 4, 16, 24)
    assert_same_bits("states", on_device, expected)


def test_more_heads_than_programs(device, monkeypatch):
    from mamba_mtp_kernels.common import turn

    monkeypatch.setattr(turn, "PROGRAMS", 4)
    shape = (3, 16, 24)
    flat = pool(16, 24, layers=3)
    actual, _ = run(turn_states, device, flat, [VK] * 7, [1, 6], KV, shape)
    expected, _ = expected_pool(flat, [VK] * 7, [1, 6], KV, shape)
    assert_same_bits("states", actual, expected)


def test_errors_name_the_argument(device):
    states = torch.zeros(1, 3, 2, 16, 24, device=device)
    bits = torch.zeros(3, dtype=torch.uint8, device=device)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="to: 2"):
        turn_states(states, bits, slots=slots, to=2)
    with pytest.raises(ValueError, match=r"axis_order: shape \(2,\)"):
        turn_states(states, bits[:2], slots=slots, to=KV)
    with pytest.raises(TypeError, match=r"axis_order: dtype torch\.int32"):
        turn_states(states, bits.int(), slots=slots, to=KV)
    with pytest.raises(ValueError, match="last 2 must be contiguous"):
        turn_states(states.transpose(3, 4), bits, slots=slots, to=KV)


def test_ops_for():
    assert ops_for("cpu").turn_states is turn_states_reference
    assert ops_for("cuda").turn_states is turn_states


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values, keys", [(128, 128), (80, 256), (64, 256), (128, 256), (64, 16)])
def test_real_sizes(values, keys, dtype):
    """Many heads at work at once: a head that stored before it had loaded everything would show here."""
    generator = torch.Generator("cuda").manual_seed(0)
    states = torch.randn(8, 20, 32, values, keys, generator=generator, device="cuda").to(dtype)
    bits = torch.randint(0, 2, (20,), generator=generator, device="cuda").to(torch.uint8)
    slots = torch.tensor([*range(1, 18), -1, 0], device="cuda")
    actual, actual_bits, expected, expected_bits = states.clone(), bits.clone(), states.clone(), bits.clone()
    for to in (KV, VK, KV):
        turn_states(actual, actual_bits, slots=slots, to=to)
        turn_states_reference(expected, expected_bits, slots=slots, to=to)
        assert torch.equal(actual_bits, expected_bits)
        assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_graph_replay():
    """Captured once, replayed on other slots and bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    states = torch.randn(4, 9, 8, 64, 128, generator=generator, device="cuda")
    bits = torch.zeros(9, dtype=torch.uint8, device="cuda")
    slots = torch.zeros(4, dtype=torch.int32, device="cuda")
    turn_states(states, bits, slots=slots, to=KV)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn_states(states, bits, slots=slots, to=KV)
    expected, expected_bits = states.clone(), bits.clone()
    for chosen in ([1, 2, 0, -1], [2, 3, 8, 1]):
        slots.copy_(torch.tensor(chosen, dtype=torch.int32))
        graph.replay()
        turn_states_reference(expected, expected_bits, slots=slots, to=KV)
        assert torch.equal(states, expected) and torch.equal(bits, expected_bits)
