"""conv1d_verify_slots: every node's convolution, its window in its own slot, and stock's bits in both."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from mamba_mtp_kernels.common.operands import NodeSlots
from mamba_mtp_kernels.conv1d import ops_for
from mamba_mtp_kernels.conv1d.reference import conv1d_verify_slots_reference
from mamba_mtp_kernels.conv1d.verify_slots import conv1d_verify_slots

from ..helpers import assert_close, assert_same_bits, chain_parents, path_to, random_tree_parents, tree_links

IMPLEMENTATIONS = [
    pytest.param(conv1d_verify_slots, id="kernel"),
    pytest.param(conv1d_verify_slots_reference, id="reference"),
]
LIMIT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Case:
    """Inputs of one verify. Slots that nobody reads are NaN; row 0 reads the slot its second node writes."""

    def __init__(
        self,
        parents,
        *,
        tree=True,
        dim=10,
        width=4,
        dtype=torch.float32,
        state_dtype=None,
        bias=True,
        padding=(),
        strides="pool",
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        batch, nodes = parents.shape
        self.parents, self.tree, self.width = parents, tree, width
        self.x = torch.randn(batch * nodes, dim + 6, generator=generator).to(dtype)[:, :dim]
        self.weight = torch.randn(dim, width, generator=generator).to(dtype)
        self.bias = torch.randn(dim, generator=generator).to(dtype) if bias else None
        slot_count = 1 + batch + batch * nodes + 2
        order = 1 + torch.randperm(slot_count - 1, generator=generator)
        self.read_slots = order[:batch].clone()
        self.write_slots = order[batch : batch + batch * nodes].view(batch, nodes).clone()
        self.read_slots[-1] = self.write_slots[-1, 0]  # a root's, as in slots mode
        self.read_slots[0] = self.write_slots[0, min(1, nodes - 1)]
        for turn, b in enumerate(padding):
            self.read_slots[b] = -(turn % 2)
        states = torch.full((slot_count, dim, width - 1), float("nan"), dtype=state_dtype or dtype)
        real = self.read_slots[self.read_slots > 0]
        states[real] = torch.randn(len(real), dim, width - 1, generator=generator).to(states.dtype)
        if strides == "transposed":
            states = states.transpose(1, 2).contiguous().transpose(1, 2)
        elif strides == "gaps":
            wide = torch.full((slot_count, dim * (width - 1) + 5), float("nan"), dtype=states.dtype)
            wide[:, :-5] = states.flatten(1)
            states = wide[:, :-5].unflatten(1, (dim, width - 1))
        self.states = states

    def run(self, op, device, *, activation="silu", index_dtype=torch.int64, **extra):
        """Returns y and the pool afterwards."""
        storage = self.states.as_strided(
            (self.states.untyped_storage().nbytes() // self.states.element_size(),), (1,), 0
        )
        on_device = storage.clone().to(device)
        states = on_device.as_strided(self.states.shape, self.states.stride(), self.states.storage_offset())
        y = op(
            self.x.to(device),
            conv_states=states,
            weight=self.weight.to(device),
            bias=None if self.bias is None else self.bias.to(device),
            activation=activation,
            nodes=NodeSlots(
                self.read_slots.to(device, index_dtype),
                self.write_slots.to(device, index_dtype),
                self.parents.to(device) if self.tree else None,
            ),
            **extra,
        )
        return y.cpu(), states.cpu()

    def path(self, b, node):
        return path_to(self.parents[b].tolist(), node)

    def windows(self):
        """The pool afterwards: copies, nothing rounded but to the pool's dtype."""
        batch, nodes = self.parents.shape
        inputs = self.x.reshape(batch, nodes, -1).to(self.states.dtype)
        expected = self.states.clone()
        for b in range(batch):
            slot = int(self.read_slots[b])
            if slot <= 0:
                continue
            for node in range(nodes):
                target = int(self.write_slots[b, node])
                if target > 0:
                    along = torch.cat([self.states[slot], inputs[b, self.path(b, node)].T], dim=1)
                    expected[target] = along[:, 1 - self.width :]
        return expected

    def oracle(self, activation="silu"):
        """Node by node in float64."""
        batch, nodes = self.parents.shape
        inputs = self.x.double().reshape(batch, nodes, -1)
        y = torch.zeros_like(inputs)
        for b in range(batch):
            slot = int(self.read_slots[b])
            for node in range(nodes) if slot > 0 else ():
                along = torch.cat([self.states[slot].double(), inputs[b, self.path(b, node)].T], dim=1)
                acc = (along[:, -self.width :] * self.weight.double()).sum(1)
                acc = acc if self.bias is None else acc + self.bias.double()
                y[b, node] = torch.nn.functional.silu(acc) if activation else acc
        return y.reshape(batch * nodes, -1)

    def stock(self, update, device, activation="silu"):
        """y [B, N, dim] and the windows [B, N, dim, K-1] of SGLang's causal_conv1d_update as its verify calls it."""
        batch, nodes = self.parents.shape
        size = (batch, nodes, self.x.shape[1], self.width - 1)
        windows = torch.full(size, float("nan"), dtype=self.states.dtype, device=device)
        links = {}
        if self.tree:
            next_token, next_sibling = (link.to(device) for link in tree_links(self.parents))
            links = {
                "retrieve_next_token": next_token,
                "retrieve_next_sibling": next_sibling,
                "retrieve_parent_token": torch.empty_like(next_token),
            }
        y = update(
            self.x.to(device).unflatten(0, (batch, nodes)).transpose(1, 2),
            self.states.clone().to(device),
            self.weight.to(device),
            None if self.bias is None else self.bias.to(device),
            activation,
            conv_state_indices=self.read_slots.to(device, torch.int32),
            intermediate_conv_window=windows,
            intermediate_state_indices=torch.arange(batch, dtype=torch.int32, device=device),
            **links,
        )
        return y.transpose(1, 2).cpu(), windows.cpu()

    def assert_stocks_bits(self, op, update, device, activation="silu"):
        y, states = self.run(op, device, activation=activation)
        stock_y, stock_windows = self.stock(update, device, activation)
        real = self.read_slots > 0
        assert_same_bits("y", y.unflatten(0, tuple(self.parents.shape))[real], stock_y[real])
        assert_same_bits("windows", states[self.write_slots[real]], stock_windows[real])


def shaped(shape, batch, nodes, seed=0):
    """parents, and whether the op is told that they are a tree."""
    generator = torch.Generator().manual_seed(nodes + 100 * seed)
    if shape == "chain":
        return chain_parents(batch, nodes), False
    parents = random_tree_parents(batch, nodes, generator)
    parents[0] = chain_parents(1, nodes)[0]  # one of them a chain, given as a tree
    return parents, True


@pytest.fixture(scope="module")
def stock_update():
    """SGLang's Triton kernel, freshly loaded: a copy imported earlier may have been compiled for another device."""
    try:
        spec = importlib.util.find_spec("sglang.kernels.ops.mamba.causal_conv1d_triton")
    except ImportError as error:
        pytest.skip(f"SGLang cannot be imported: {error}")
    if spec is None or spec.loader is None:
        pytest.skip("this SGLang has no sglang.kernels.ops.mamba.causal_conv1d_triton")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.causal_conv1d_update


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("nodes", [*range(1, 17), 32])
def test_matches_oracle(op, shape, nodes, device):
    parents, tree = shaped(shape, 3, nodes)
    case = Case(parents, tree=tree, seed=nodes, padding=(1,), strides=("pool", "gaps", "transposed")[nodes % 3])
    y, states = case.run(op, device)
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])
    assert (y.unflatten(0, (3, nodes))[1] == 0).all()
    assert_same_bits("conv_states, untouched slots among them", states, case.windows())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("bias", [True, False])
def test_widths_and_epilogues(op, shape, width, activation, bias, device):
    parents, tree = shaped(shape, 2, 6)
    case = Case(parents, tree=tree, width=width, bias=bias, dim=70)
    y, states = case.run(op, device, activation=activation)
    assert_close("y", y, case.oracle(activation), LIMIT[torch.float32])
    assert_same_bits("conv_states", states, case.windows())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(op, dtype, state_dtype, device):
    case = Case(shaped("tree", 2, 5)[0], dim=33, dtype=dtype, state_dtype=state_dtype)
    y, states = case.run(op, device)
    assert y.dtype == dtype
    assert_close("y", y, case.oracle(), LIMIT[dtype])
    if device.type == "cpu" and op is conv1d_verify_slots and state_dtype is torch.bfloat16 is not dtype:
        # Triton's interpreter truncates to bf16 where the GPU rounds
        assert_close("windows", states[case.write_slots], case.windows()[case.write_slots], 2 * LIMIT[state_dtype])
    else:
        assert_same_bits("conv_states", states, case.windows())


def test_float64_reference_is_the_oracle(device):
    case = Case(shaped("tree", 3, 7)[0], dtype=torch.bfloat16, padding=(2,))
    y, _ = case.run(conv1d_verify_slots_reference, device, compute_dtype=torch.float64)
    assert_close("y", y, case.oracle(), 1e-14)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padding_rows_and_nodes(op, index_dtype, device):
    case = Case(shaped("tree", 5, 4)[0], padding=(1, 4))
    case.write_slots[2, 1], case.write_slots[3, 0] = -1, 0
    expected, windows = case.oracle(), case.windows()
    case.parents[1] = torch.tensor([9, 10**6, -(10**6), 3])
    case.write_slots[1], case.write_slots[4] = 10**6, 10**6
    y, states = case.run(op, device, index_dtype=index_dtype)
    assert (y.unflatten(0, (5, 4))[[1, 4]] == 0).all()
    assert_close("y", y, expected, LIMIT[torch.float32])
    assert_same_bits("conv_states", states, windows)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("node_of_read_slot", range(5))
def test_reads_before_it_writes(op, node_of_read_slot, device):
    """Whichever node's slot the old window lies in, and over several blocks of channels."""
    case = Case(shaped("tree", 1, 5, seed=2)[0], dim=300)
    old = int(case.write_slots[0, node_of_read_slot])
    case.states[old] = case.states[case.read_slots[0]].clone()
    case.read_slots[0] = old
    y, states = case.run(op, device)
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])
    assert_same_bits("conv_states", states, case.windows())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_step_after_step(op, device):
    """Three verifies, each from the slot of the last one's accepted node: one convolution of all accepted inputs."""
    case = Case(shaped("tree", 2, 4)[0], seed=5)
    history = [case.states[slot] for slot in case.read_slots.tolist()]
    generator = torch.Generator().manual_seed(6)
    for step in range(3):
        case.x = torch.randn(case.x.shape, generator=generator)
        case.parents = random_tree_parents(2, 4, generator)
        y, states = case.run(op, device)
        for b in range(2):
            node = (step + 2 * b) % 4
            taken = case.x.unflatten(0, (2, 4))[b, case.path(b, node)].T
            history[b] = torch.cat([history[b], taken], dim=1)
            acc = (history[b][:, -4:].double() * case.weight.double()).sum(1) + case.bias.double()
            assert_close("y", y.unflatten(0, (2, 4))[b, node], torch.nn.functional.silu(acc), LIMIT[torch.float32])
            assert_same_bits("window", states[case.write_slots[b, node]], history[b][:, -3:].contiguous())
            case.read_slots[b] = case.write_slots[b, node]
        case.states = states


@pytest.mark.in_turn
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("nodes", [1, 3, 4, 13])
def test_bits_of_stock(stock_update, shape, width, nodes, device):
    parents, tree = shaped(shape, 3, nodes)
    for dtype, activation, bias in [
        (torch.float32, "silu", True),
        (torch.float16, "silu", True),
        (torch.float32, None, False),
    ]:
        case = Case(parents, tree=tree, width=width, dtype=dtype, bias=bias, padding=(1,), seed=nodes)
        case.read_slots[1] = -1  # stock's only padding
        case.assert_stocks_bits(conv1d_verify_slots, stock_update, device, activation)


def test_bits_of_stock_with_other_pool_dtype(stock_update, device):
    """float16 model, float32 pool. Chains only: stock's tree does not compile for it."""
    case = Case(chain_parents(2, 5), tree=False, dtype=torch.float16, state_dtype=torch.float32)
    case.assert_stocks_bits(conv1d_verify_slots, stock_update, device)


def test_chain_given_as_tree_has_the_trees_bits(stock_update, device):
    """The two orders of summing are told apart by these inputs, so the tests above do compare bits."""
    case = Case(chain_parents(2, 6), tree=True, dim=64)
    case.assert_stocks_bits(conv1d_verify_slots, stock_update, device)
    tree, windows = case.run(conv1d_verify_slots, device)
    case.tree = False
    chain, chain_windows = case.run(conv1d_verify_slots, device)
    assert not torch.equal(tree, chain)
    assert_close("y", tree, chain, LIMIT[torch.float32])
    assert_same_bits("windows", windows, chain_windows)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(
    "dtype, state_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("nodes", [1, 3, 4, 8, 16])
def test_reference_has_the_bits_of_the_cpu_engine(shape, dtype, state_dtype, nodes):
    from sglang_mamba_mtp.cpu.conv1d_ops import causal_conv1d_update_cpu

    parents, tree = shaped(shape, 3, nodes)
    for width, activation, bias in [(4, "silu", True), (2, None, False), (3, "silu", False)]:
        case = Case(
            parents, tree=tree, width=width, dtype=dtype, state_dtype=state_dtype, bias=bias, padding=(2,), dim=48
        )
        case.read_slots[2] = -1
        case.assert_stocks_bits(conv1d_verify_slots_reference, causal_conv1d_update_cpu, "cpu", activation)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_of_stock_at_real_sizes(stock_update, shape, nodes, dtype):
    for width, batch, dim in [(4, 5, 8192), (4, 64, 2080), (3, 3, 4352), (2, 3, 1000)]:
        parents, tree = shaped(shape, batch, nodes)
        case = Case(parents, tree=tree, width=width, dim=dim, dtype=dtype, padding=(1,), seed=nodes)
        case.read_slots[1] = -1
        case.assert_stocks_bits(conv1d_verify_slots, stock_update, "cuda")
        _, states = case.run(conv1d_verify_slots, "cuda")
        assert_same_bits("conv_states", states, case.windows())


@pytest.mark.gpu
def test_graph_replay():
    """Captured once, replayed on other slots."""
    case = Case(shaped("tree", 4, 6)[0], dim=512, dtype=torch.bfloat16)
    read_slots, write_slots = case.read_slots.cuda(), case.write_slots.cuda()
    states, pool = case.states.clone().cuda(), case.states.clone().cuda()
    arguments = {
        "weight": case.weight.cuda(), "bias": case.bias.cuda(), "activation": "silu",
        "nodes": NodeSlots(read_slots, write_slots, case.parents.cuda()),
    }  # fmt: skip
    x = case.x.cuda()
    conv1d_verify_slots(x, conv_states=pool, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv1d_verify_slots(x, conv_states=pool, **arguments)
    pool.copy_(states)
    for turn in range(3):
        graph.replay()
        eager = conv1d_verify_slots(x, conv_states=states, **arguments)
        assert_same_bits("y", y, eager)
        assert_same_bits("conv_states", pool, states)
        read_slots.copy_(write_slots[:, turn])
        read_slots[turn] = 0


@pytest.mark.parametrize("mutate", ["parent", "tap order", "shifted window", "other slot", "write slot"])
def test_mutations_are_seen(mutate, device):
    case = Case(torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32), seed=4)
    expected, windows = case.oracle(), case.windows()
    if mutate == "parent":
        case.parents[0, 4] = 1
    elif mutate == "tap order":
        case.weight = case.weight.flip(1).contiguous()
    elif mutate == "shifted window":
        case.states = case.states.roll(1, 2)
    elif mutate == "other slot":
        case.states[case.write_slots[0, 0]] = 0.5
        case.read_slots[0] = case.write_slots[0, 0]
    else:
        case.write_slots = case.write_slots.flip(1).contiguous()
    y, states = case.run(conv1d_verify_slots, device)
    if mutate != "write slot":
        with pytest.raises(AssertionError, match="RMS error ratio"):
            assert_close("y", y, expected, 1e-2)
    if mutate != "tap order":
        with pytest.raises(AssertionError, match="bytes differ"):
            assert_same_bits("conv_states", states, windows)


def test_errors_name_the_argument(device):
    case = Case(chain_parents(2, 3))
    with pytest.raises(ValueError, match="activation: 'gelu'"):
        case.run(conv1d_verify_slots, device, activation="gelu")
    case.parents = case.parents[:1]
    with pytest.raises(ValueError, match=r"parents: shape \(1, 3\), expected \[B>=2, N=3\]"):
        case.run(conv1d_verify_slots, device)
    case.tree, case.read_slots = False, case.read_slots[:1]
    with pytest.raises(ValueError, match=r"x: shape \(6, 10\), expected \[B\*N=3, dim=10\]"):
        case.run(conv1d_verify_slots, device)
    case = Case(chain_parents(2, 3))
    case.weight = case.weight[:, :3].contiguous()
    with pytest.raises(ValueError, match=r"conv_states: shape \(11, 10, 3\), expected \[S=\?, dim=10, K-1=2\]"):
        case.run(conv1d_verify_slots, device)


def test_ops_for():
    assert ops_for("cpu").conv1d_verify_slots is conv1d_verify_slots_reference
    assert ops_for("cuda").conv1d_verify_slots is conv1d_verify_slots
