"""conv1d_verify: the convolution of every node along its own path."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.operands import NodeSlots, Rows
from mamba_mtp_kernels.conv1d import ops_for, verify_replay
from mamba_mtp_kernels.conv1d.reference import conv1d_verify_reference
from mamba_mtp_kernels.conv1d.verify_replay import conv1d_verify

from ..helpers import assert_close, assert_same_bits, chain_parents, path_to, random_tree_parents

IMPLEMENTATIONS = [pytest.param(conv1d_verify, id="kernel"), pytest.param(conv1d_verify_reference, id="reference")]
LIMIT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Case:
    """Inputs of one verify; everything that must not be read is NaN."""

    def __init__(
        self,
        parents,
        *,
        dim=10,
        width=4,
        dtype=torch.float32,
        state_dtype=None,
        bias=True,
        slots=None,
        strides="pool",
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        batch, nodes = parents.shape
        self.parents, self.width = parents, width
        self.x = torch.randn(batch * nodes, dim + 6, generator=generator).to(dtype)[:, :dim]
        self.weight = torch.randn(dim, width, generator=generator).to(dtype)
        self.bias = torch.randn(dim, generator=generator).to(dtype) if bias else None
        slot_count = batch + 3
        states = torch.randn(slot_count, dim, width - 1, generator=generator).to(state_dtype or dtype)
        self.slots = torch.tensor(slots if slots is not None else [batch + 1 - b for b in range(batch)])
        self.rows = torch.randperm(batch + 1, generator=generator)[:batch]
        self.rows[self.slots <= 0] = 10**6
        unused = [s for s in range(slot_count) if s not in self.slots.tolist()]
        states[unused] = float("nan")
        self.states = states.transpose(1, 2).contiguous().transpose(1, 2) if strides == "transposed" else states
        self.conv_inputs = torch.full((batch + 1, nodes, dim), float("nan"), dtype=dtype)

    def run(self, op, device, *, activation="silu", **extra):
        states, conv_inputs = self.states.clone().to(device), self.conv_inputs.clone().to(device)
        y = op(
            self.x.to(device),
            conv_states=states,
            weight=self.weight.to(device),
            bias=None if self.bias is None else self.bias.to(device),
            activation=activation,
            rows=Rows(self.slots.to(device), self.rows.to(device), parents=self.parents.to(device)),
            conv_inputs=conv_inputs,
            **extra,
        )
        assert_same_bits("conv_states", states, self.states)
        return y.cpu(), conv_inputs.cpu()

    def oracle(self, activation="silu"):
        """Node by node in float64: last K inputs of (window, path), dotted with the weight."""
        batch, nodes = self.parents.shape
        inputs = self.x.double().reshape(batch, nodes, -1)
        y = torch.zeros_like(inputs)
        for b in range(batch):
            slot = int(self.slots[b])
            if slot <= 0:
                continue
            for node in range(nodes):
                path = path_to(self.parents[b].tolist(), node)
                window = torch.cat([self.states[slot].double(), inputs[b, path].T], dim=1)[:, -self.width :]
                acc = (window * self.weight.double()).sum(1)
                if self.bias is not None:
                    acc = acc + self.bias.double()
                y[b, node] = torch.nn.functional.silu(acc) if activation else acc
        return y.reshape(batch * nodes, -1)

    def expected_inputs(self):
        batch, nodes = self.parents.shape
        expected = self.conv_inputs.clone()
        real = self.slots > 0
        expected[self.rows[real]] = self.x.reshape(batch, nodes, -1)[real]
        return expected


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 16, 32])
def test_matches_oracle(op, shape, nodes, device):
    generator = torch.Generator().manual_seed(nodes)
    parents = chain_parents(2, nodes) if shape == "chain" else random_tree_parents(2, nodes, generator)
    case = Case(parents, seed=nodes)
    y, conv_inputs = case.run(op, device)
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])
    assert_same_bits("conv_inputs", conv_inputs, case.expected_inputs())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("bias", [True, False])
def test_widths_and_epilogues(op, width, activation, bias, device):
    parents = random_tree_parents(2, 6, torch.Generator().manual_seed(width))
    case = Case(parents, width=width, bias=bias, strides="transposed" if bias else "pool")
    y, conv_inputs = case.run(op, device, activation=activation)
    assert_close("y", y, case.oracle(activation), LIMIT[torch.float32])
    assert_same_bits("conv_inputs", conv_inputs, case.expected_inputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, state_dtype, device):
    case = Case(
        random_tree_parents(2, 5, torch.Generator().manual_seed(3)), dim=33, dtype=dtype, state_dtype=state_dtype
    )
    y, conv_inputs = case.run(conv1d_verify, device)
    rounded, _ = case.run(conv1d_verify_reference, device)
    assert y.dtype == rounded.dtype == dtype
    assert_close("kernel", y, case.oracle(), LIMIT[dtype])
    assert_close("reference", rounded, case.oracle(), LIMIT[dtype])
    assert_same_bits("conv_inputs", conv_inputs, case.expected_inputs())


def test_float64_reference_is_the_oracle(device):
    case = Case(random_tree_parents(3, 7, torch.Generator().manual_seed(5)), dtype=torch.bfloat16, slots=[2, 0, 1])
    y, _ = case.run(conv1d_verify_reference, device, compute_dtype=torch.float64)
    assert_close("y", y, case.oracle(), 1e-14)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_tree_that_is_a_chain_has_the_chains_bits(op, device):
    """Branches beside a path must not change the path's outputs."""
    case = Case(torch.tensor([[-1, 0, 0, 1, 3, 1, 4]], dtype=torch.int32), seed=8)
    tree, _ = case.run(op, device)
    path = [0, 1, 3, 4, 6]
    chain = Case(chain_parents(1, 5), seed=8)
    chain.x, chain.states, chain.weight, chain.bias = case.x[path], case.states, case.weight, case.bias
    along, _ = chain.run(op, device)
    assert_same_bits("y", tree[path], along)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_a_chain_in_two_steps_has_the_bits_of_one(op, device):
    """Verify of 6 = verify of 4, window moved on by 4, verify of 2: what decode without speculation computes."""
    whole = Case(chain_parents(1, 6), seed=11)
    y, _ = whole.run(op, device)
    first = Case(chain_parents(1, 4), seed=11)
    first.x, first.states, first.weight, first.bias = whole.x[:4], whole.states, whole.weight, whole.bias
    second = Case(chain_parents(1, 2), seed=11)
    moved = whole.states.clone()
    slot = int(whole.slots[0])
    moved[slot] = whole.x[1:4].T
    second.x, second.states, second.weight, second.bias = whole.x[4:], moved, whole.weight, whole.bias
    assert_same_bits("y", torch.cat([first.run(op, device)[0], second.run(op, device)[0]]), y)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padding_rows(op, index_dtype, device):
    case = Case(random_tree_parents(4, 3, torch.Generator().manual_seed(1)), slots=[0, 2, -1, 5])
    case.parents[0] = torch.tensor([9, 10**6, -(10**6)])
    case.slots, case.rows = case.slots.to(index_dtype), case.rows.to(index_dtype)
    y, conv_inputs = case.run(op, device)
    assert (y.reshape(4, 3, -1)[[0, 2]] == 0).all()
    assert_same_bits("conv_inputs", conv_inputs, case.expected_inputs())
    case.parents[0] = chain_parents(1, 3)[0]
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])


def test_many_programs_path(device, monkeypatch):
    """Enough channels that a program handles all nodes of a row."""
    case = Case(random_tree_parents(5, 3, torch.Generator().manual_seed(2)), dim=4, slots=[1, 0, 3, 4, 5])
    spread, _ = case.run(conv1d_verify, device)
    monkeypatch.setattr(verify_replay, "PROGRAMS_WANTED", 0)
    y, conv_inputs = case.run(conv1d_verify, device)
    assert_same_bits("y", y, spread)
    assert_same_bits("conv_inputs", conv_inputs, case.expected_inputs())


@pytest.mark.parametrize("mutate", ["parent", "tap order", "shifted window", "stale window"])
def test_mutations_are_seen(mutate, device):
    case = Case(torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32), seed=4)
    expected = case.oracle()
    if mutate == "parent":
        case.parents[0, 4] = 1
    elif mutate == "tap order":
        case.weight = case.weight.flip(1).contiguous()
    elif mutate == "shifted window":
        case.states = case.states.roll(1, 2)
    else:
        case.states = case.states.roll(1, 0).nan_to_num(0.5)
    y, _ = case.run(conv1d_verify, device)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("y", y, expected, 1e-2)


def test_errors_name_the_argument(device):
    case = Case(chain_parents(1, 3))
    with pytest.raises(ValueError, match="activation: 'gelu'"):
        case.run(conv1d_verify, device, activation="gelu")
    case.weight = case.weight[:, :3].contiguous()
    with pytest.raises(ValueError, match="conv_states: shape"):
        case.run(conv1d_verify, device)


def test_ops_for():
    assert ops_for("cpu").conv1d_verify.func is conv1d_verify_reference
    assert ops_for("cuda").conv1d_verify is conv1d_verify


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_engine_convolves_alike_in_every_mode(dtype):
    """Replay's op for a CPU and slots mode's, which has the bits of the CPU engine's own convolution."""
    case = Case(chain_parents(3, 5), dim=40, dtype=dtype, state_dtype=dtype)
    ops = ops_for("cpu")
    ours, _ = case.run(ops.conv1d_verify, torch.device("cpu"))
    theirs = ops.conv1d_verify_slots(
        case.x,
        conv_states=case.states.clone(),
        weight=case.weight,
        bias=case.bias,
        activation="silu",
        nodes=NodeSlots(case.slots, torch.zeros(3, 5, dtype=torch.int32)),
    )
    # products rounded to bf16 would be off by 2e-3
    assert_close("y", ours, theirs, 1e-6 if dtype == torch.float32 else 2e-4)
