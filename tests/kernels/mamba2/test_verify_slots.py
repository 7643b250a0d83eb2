"""mamba2_verify_slots: against the float64 recurrence, and bit for bit against SGLang's own verify."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV
from mamba_mtp_kernels.mamba2 import ops_for
from mamba_mtp_kernels.mamba2.arguments import SlotsTiling, stock_tiling
from mamba_mtp_kernels.mamba2.reference import mamba2_verify_slots_reference
from mamba_mtp_kernels.mamba2.verify_slots import mamba2_verify_slots

from ..helpers import assert_close, assert_same_bits, assert_same_numbers
from .slots_case import SlotsCase, Stock, make_slots_case

IMPLEMENTATIONS = [
    pytest.param(mamba2_verify_slots, id="kernel"),
    pytest.param(mamba2_verify_slots_reference, id="reference"),
]
# float32: sums of dstate terms. 16-bit states: in a tree every node of a path adds a rounding
LIMIT = {torch.float32: 6e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture
def stock(monkeypatch, device) -> Stock:
    return Stock(monkeypatch, device)


def check(case: SlotsCase, op=mamba2_verify_slots, *, out_dtype=torch.float32, **extra) -> torch.Tensor:
    """Run `op` on a copy: outputs and states against the oracle, everything else untouched; returns y and the pool."""
    case = case.clone()
    before, (expected, pool) = case.clone(), case.oracle()
    x, states = case.tensors["x"], case.tensors["states"]
    out = torch.full(x.shape, float("nan"), dtype=out_dtype, device=x.device)
    assert case.run(op, out=out, **extra) is out
    limit = LIMIT[states.dtype] if case.tree else LIMIT[torch.float32]
    live = case.live
    assert_close("y", out[live], expected[live], max(limit, LIMIT[out_dtype]))
    assert (out[~live] == 0).all(), "padding rows must be zero"
    slots = [slot for _, slot in case.written()]
    assert_close("states", states[slots], pool[slots], LIMIT[states.dtype])
    others = [slot for slot in range(states.shape[0]) if slot not in slots]
    assert_same_bits("other slots", states[others], before.tensors["states"][others])
    for name, tensor in case.tensors.items():
        if name != "states" and tensor is not None:
            assert_same_bits(name, tensor, before.tensors[name])
    assert_same_bits("parents", case.parents, before.parents)
    return out, states


def same_as_stock(case: SlotsCase, stock: Stock, op=mamba2_verify_slots) -> None:
    """Outputs, in the model's dtype, and every written state have stock's bits."""
    case = case.clone()
    y, states = stock.verify(case.clone())
    tiling = stock.tiling(case.tensors["states"].shape[-1])
    assert_same_bits("y", case.run(op, tiling=tiling)[case.live], y[case.live])
    tokens, slots = zip(*case.written(), strict=True)
    assert_same_bits("states", case.tensors["states"][list(slots)], states.flatten(0, 1)[list(tokens)])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 11, 16])
def test_nodes(op, tree, nodes, device):
    check(make_slots_case(nodes=nodes, tree=tree, nheads=2, ngroups=1, seed=nodes, device=device), op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_the_slot_read_is_written_too(op, tree, nodes, device):
    for seed in range(3):
        check(make_slots_case(nodes=nodes, tree=tree, in_place=True, seed=seed, device=device), op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_padding_strides_int64_and_nodes_without_a_slot(op, tree, device):
    options = {"batch": 5, "tree": tree, "in_place": True, "seed": 4}
    case = make_slots_case(
        **options,
        padding=(1, 4),
        unwritten=True,
        strided=True,
        expanded=True,
        index_dtype=torch.int64,
        device=device,
    )
    y, _ = check(case, op)
    plain, _ = check(make_slots_case(**options, device=device), op)
    assert_same_bits("y", y[case.live], plain[case.live])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_all_rows_are_padding(op, device):
    check(make_slots_case(batch=2, padding=(0, 1), unwritten=True, device=device), op)


@pytest.mark.parametrize(
    ("nheads", "headdim", "ngroups", "dstate"),
    [(2, 64, 1, 16), (2, 80, 2, 32), (1, 128, 1, 64), (2, 80, 1, 128), (1, 64, 1, 256), (3, 20, 3, 24), (4, 5, 2, 130)],
)
def test_head_sizes(nheads, headdim, ngroups, dstate, device):
    case = make_slots_case(
        batch=2, nodes=3, tree=True, nheads=nheads, headdim=headdim, ngroups=ngroups, dstate=dstate, device=device
    )
    y, states = check(case)
    other = check(case, tiling=SlotsTiling(2, 1))
    assert_close("y", other[0], y, 3e-7)
    slots = [slot for _, slot in case.written()]
    assert_close("states", other[1][slots], states[slots], 3e-7)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(op, dtype, state_dtype, tree, device):
    case = make_slots_case(tree=tree, nheads=2, dtype=dtype, state_dtype=state_dtype, device=device)
    check(case, op)
    check(case, op, out_dtype=dtype)
    y = case.run(op)
    assert y.dtype == dtype and y.is_contiguous()


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("parts", ["all", "none"])
def test_optional_parts(op, softplus, parts, device):
    case = make_slots_case(nodes=3, nheads=2, device=device)
    case.dt_softplus = softplus
    if parts == "none":
        case.tensors["D"] = case.tensors["dt_bias"] = None
    case.tensors["dt"][0] += 30  # softplus' linear branch
    if not softplus:
        case.tensors["dt"] = case.tensors["dt"].abs()  # negative steps would grow without bound
        if case.tensors["dt_bias"] is not None:
            case.tensors["dt_bias"] = case.tensors["dt_bias"].abs()
    check(case, op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_tree_that_is_a_chain(op, device):
    """With float32 states, which lose nothing in their slots, a chain handed as a tree has the chain's bits."""
    chain = make_slots_case(nodes=6, device=device)
    tree = chain.clone()
    tree.tree = True
    assert_same_bits("y", tree.run(op), chain.run(op))
    assert_same_bits("states", tree.tensors["states"], chain.tensors["states"])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_two_verifies_have_the_bits_of_one(state_dtype, device):
    """A verify that starts where the last one ended: exact with float32 states, and from a rounded state otherwise."""
    whole = make_slots_case(nodes=6, tree=True, state_dtype=state_dtype, device=device)
    whole.parents[:] = torch.arange(-1, 5, dtype=torch.int32)
    y = whole.run(mamba2_verify_slots)
    first = make_slots_case(nodes=6, tree=True, state_dtype=state_dtype, device=device)
    first.parents[:] = whole.parents
    second = first.clone()
    for case, nodes in ((first, slice(0, 2)), (second, slice(2, 6))):
        for name in ("x", "dt", "B", "C"):
            case.tensors[name] = case.tensors[name].unflatten(0, (3, 6))[:, nodes].flatten(0, 1)
        case.tensors["write_slots"] = case.tensors["write_slots"][:, nodes]
        case.parents = torch.arange(-1, case.tensors["write_slots"].shape[1] - 1, device=device).expand(3, -1)
    parts = [first.run(mamba2_verify_slots)]
    second.tensors["states"] = first.tensors["states"]
    second.tensors["read_slots"] = first.tensors["write_slots"][:, 1].contiguous()
    parts.append(second.run(mamba2_verify_slots))
    assert_same_bits("y", torch.cat([p.unflatten(0, (3, -1)) for p in parts], 1).flatten(0, 1), y)
    assert_same_bits("states", second.tensors["states"], whole.tensors["states"])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_a_rejected_branch_does_not_matter(op, device):
    case = make_slots_case(batch=1, nodes=5, tree=True, device=device)
    case.parents[0] = torch.tensor([-1, 0, 0, 2, 1])
    corrupted = case.clone()
    for name in ("x", "dt", "B", "C"):
        corrupted.tensors[name][[1, 4]] = 50.0
    y, other = case.run(op), corrupted.run(op)
    kept = [0, 2, 3]
    assert_same_bits("y", other[kept], y[kept])
    slots = case.tensors["write_slots"][0, kept].long()
    assert_same_bits("states", corrupted.tensors["states"][slots], case.tensors["states"][slots])


# -------------------------------------------------------------------------------------------------------- axis orders


@pytest.mark.in_turn
@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("in_place", [False, True], ids=["other slot", "own slot"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("headdim", "dstate"), [(12, 16), (20, 24), (64, 16)])
def test_axis_orders_change_nothing(op, in_place, tree, state_dtype, headdim, dstate, device):
    """Slots of both orders in one batch, read and written: outputs and states of the VK run, each lying as its bit
    says."""
    options = {"batch": 4, "nodes": 5, "tree": tree, "headdim": headdim, "dstate": dstate, "state_dtype": state_dtype}
    options |= {"padding": (3,), "strided": True, "in_place": in_place, "device": device}
    plain = make_slots_case(**options)
    mixed = make_slots_case(**options, kv=(0, 2))
    assert_same_numbers("y", mixed.run(op), plain.run(op))
    slots = [slot for _, slot in plain.written()]
    assert 0 < mixed.tensors["axis_order"][slots].sum() < len(slots)
    assert_same_numbers("states", mixed.as_vk()[slots], plain.tensors["states"][slots])
    case = make_slots_case(**options, kv=(0, 2))
    others = [slot for slot in range(plain.tensors["states"].shape[0]) if slot not in slots]
    assert_same_bits("other slots", mixed.tensors["states"][others], case.tensors["states"][others])
    assert_same_bits("axis_order", mixed.tensors["axis_order"], case.tensors["axis_order"])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_a_stale_bit_is_seen(op, device):
    case = make_slots_case(kv=(0, 2), device=device)
    expected, _ = case.oracle()
    case.tensors["axis_order"][case.tensors["read_slots"][1].long()] = KV
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("y", case.run(op), expected, 1e-2)


# -------------------------------------------------------------------------------------------------------------- stock


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 4, 7, 16])
def test_bits_of_stock(nodes, tree, stock, device):
    case = make_slots_case(nodes=nodes, tree=tree, expanded=True, padding=(1,), seed=nodes, device=device)
    same_as_stock(case, stock)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_stock_in_dtypes(dtype, state_dtype, tree, stock, device):
    case = make_slots_case(tree=tree, expanded=True, in_place=True, dtype=dtype, state_dtype=state_dtype, device=device)
    same_as_stock(case, stock)


@pytest.mark.in_turn
@pytest.mark.parametrize("headdim", [64, 80, 128])
@pytest.mark.parametrize("dstate", [16, 32, 64, 128, 256])
def test_bits_of_stock_at_head_sizes(headdim, dstate, stock, device):
    for tree in (False, True):
        case = make_slots_case(
            batch=1,
            nodes=3,
            tree=tree,
            nheads=2,
            headdim=headdim,
            ngroups=1,
            dstate=dstate,
            expanded=True,
            strided=True,
            state_dtype=torch.bfloat16,
            dtype=torch.bfloat16,
            device=device,
        )
        same_as_stock(case, stock)


def test_bits_of_stock_with_large_and_limitless_steps(stock, device):
    case = make_slots_case(expanded=True, device=device)
    case.tensors["dt"][:, :, 0][0] += 30  # softplus' linear branch
    same_as_stock(case, stock)
    case.dt_softplus = False
    same_as_stock(case, stock)


def test_bits_of_stock_from_mixed_orders(stock, device):
    options = {"tree": True, "expanded": True, "state_dtype": torch.bfloat16, "device": device}
    y, _ = stock.verify(make_slots_case(**options))
    case = make_slots_case(**options, kv=(1,))
    assert_same_bits("y", case.run(mamba2_verify_slots, tiling=stock.tiling(16)), y)


def test_launch_shapes_are_those_of_the_installed_sglang(stock):
    __version__ = pytest.importorskip("sglang.version").__version__
    numbers = tuple(int(part) for part in __version__.split("+")[0].split(".")[:3] if part.isdigit())
    if not (0, 5, 17) <= numbers <= (0, 5, 23):
        pytest.skip(f"SGLang {__version__}: launch shapes are known of 0.5.17 to 0.5.23")
    for dstate in (16, 24, 32, 64, 96, 128, 130, 256):
        assert stock.tiling(dstate) == stock_tiling(dstate, numbers), dstate


@pytest.mark.parametrize("parts", ["SGLang's call", "no D, no bias", "no softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("headdim", "dstate", "nodes"), [(12, 16, 1), (10, 24, 4), (64, 128, 5)])
def test_reference_has_the_bits_of_the_cpu_engine(tree, dtype, headdim, dstate, nodes, parts):
    """What SGLang runs where there is no GPU, on the CPU in both cases."""
    ops = pytest.importorskip("sglang_mamba_mtp.cpu.mamba2_ops")
    case = make_slots_case(
        nodes=nodes,
        tree=tree,
        headdim=headdim,
        dstate=dstate,
        padding=(1,),
        expanded=True,
        in_place=True,
        dtype=dtype,
        state_dtype=dtype,
    )
    case.tensors["x"].nan_to_num_(0.5)  # what stock computes for padding rows it does not keep
    if parts.startswith("no D"):
        case.tensors["D"] = case.tensors["dt_bias"] = None
    case.dt_softplus = parts != "no softplus"
    given, batch = case.tensors, 3
    out = torch.full(given["x"].shape, float("nan"), dtype=dtype)
    buffer = torch.full((batch, nodes, *given["states"].shape[1:]), float("nan"), dtype=dtype)
    x, dt, B, C = (given[name].unflatten(0, (batch, nodes)) for name in ("x", "dt", "B", "C"))
    ops.selective_state_update(
        given["states"].clone(),
        x,
        dt,
        given["A"],
        B,
        C,
        given["D"],
        z=None,
        dt_bias=given["dt_bias"],
        dt_softplus=case.dt_softplus,
        state_batch_indices=torch.where(given["read_slots"] > 0, given["read_slots"], -1),
        out=out.unflatten(0, (batch, nodes)),
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        cache_steps=nodes,
        retrieve_parent_token=case.parents if tree else None,
        intermediate_state_indices=torch.arange(batch),
    )
    assert_same_bits("y", case.run(mamba2_verify_slots_reference), out)
    tokens, slots = zip(*case.written(), strict=True)
    assert_same_bits("states", given["states"][list(slots)], buffer.flatten(0, 1)[list(tokens)])


# ---------------------------------------------------------------------------------------------------------- mutations


@pytest.mark.parametrize("mutate", ["parent", "dropped decay", "read slot", "write slots", "head", "D"])
def test_mutations_are_seen(mutate, device):
    case = make_slots_case(batch=2, nodes=4, tree=True, device=device, seed=9)
    expected, pool = case.oracle()
    tensors, slots = case.tensors, case.tensors["write_slots"].flatten().tolist()
    if mutate == "parent":
        case.parents[0, 3] = (case.parents[0, 3] + 1) % 3
    elif mutate == "dropped decay":
        tensors["A"] = torch.zeros_like(tensors["A"])
    elif mutate == "read slot":
        tensors["read_slots"] = tensors["read_slots"].flip(0).contiguous()
    elif mutate == "write slots":
        tensors["write_slots"][0, :2] = tensors["write_slots"][0, :2].flip(0)
    elif mutate == "head":
        tensors["A"] = tensors["A"].roll(1)
    else:
        tensors["D"] = tensors["D"] + 0.01
    y = case.run(mamba2_verify_slots)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("y", y, expected, 1e-4)
        assert_close("states", tensors["states"][slots], pool[slots], 1e-4)


def test_a_skipped_rounding_is_seen(stock, device):
    """A 16-bit tree run as a chain keeps what stock's rounding drops: close, and not stock's bits."""
    case = make_slots_case(
        nodes=5, tree=True, expanded=True, state_dtype=torch.bfloat16, dtype=torch.bfloat16, device=device
    )
    case.parents[:] = torch.arange(-1, 4, dtype=torch.int32)
    exact = case.clone()
    exact.tree = False
    y, _ = stock.verify(case.clone())
    assert_same_bits("y", case.run(mamba2_verify_slots, tiling=stock.tiling(16)), y)
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_same_bits("y", exact.run(mamba2_verify_slots, tiling=stock.tiling(16)), y)


def test_errors_name_the_argument(device):
    for name, change, error in (
        ("write_slots", lambda t: t[:, :3], r"x: shape \(12, 4, 12\), expected \[B\*N=9"),
        ("read_slots", lambda t: t[:2], r"x: shape \(12, 4, 12\), expected \[B\*N=8"),
        ("states", lambda t: t.transpose(2, 3).contiguous(), r"states: shape"),
        ("axis_order", lambda t: torch.zeros(3, dtype=torch.uint8, device=device), r"axis_order: shape \(3,\)"),
        ("A", lambda t: torch.ones(4, 12, 16, device=device), r"A: shape .* one value a head"),
    ):
        case = make_slots_case(device=device)
        case.tensors[name] = change(case.tensors[name])
        with pytest.raises(ValueError, match=error):
            case.run(mamba2_verify_slots)
    case = make_slots_case(device=device)
    case.tensors["B"] = case.tensors["B"].half()
    with pytest.raises(TypeError, match=r"B: dtype torch\.float16"):
        case.run(mamba2_verify_slots)


def test_ops_for():
    assert ops_for("cpu").mamba2_verify_slots is mamba2_verify_slots_reference
    kernel = ops_for("cuda", (0, 5, 17)).mamba2_verify_slots
    assert kernel.func is mamba2_verify_slots and kernel.keywords == {"sglang": (0, 5, 17)}


# ---------------------------------------------------------------------------------------------------------------- GPU

# nheads, headdim, ngroups, dstate. Few heads: a program knows one only
MODELS = [(16, 80, 2, 128), (16, 64, 2, 128), (8, 64, 1, 256), (8, 128, 1, 64), (8, 64, 1, 32), (8, 80, 1, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 4, 16])
@pytest.mark.parametrize(("nheads", "headdim", "ngroups", "dstate"), MODELS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_stock_at_model_shapes(nodes, tree, nheads, headdim, ngroups, dstate, state_dtype, stock, device):
    options = {"batch": 6, "nodes": nodes, "tree": tree, "nheads": nheads, "headdim": headdim, "ngroups": ngroups}
    options |= {"dstate": dstate, "dtype": torch.bfloat16, "state_dtype": state_dtype, "expanded": True}
    options |= {"padding": (5,), "strided": True, "in_place": True, "device": device}
    case = make_slots_case(**options)
    same_as_stock(case, stock)
    for in_place in (False, True):
        kv = make_slots_case(**{**options, "in_place": in_place}, kv=(0, 3))
        plain = make_slots_case(**{**options, "in_place": in_place})
        assert_same_bits("y", kv.run(mamba2_verify_slots), plain.run(mamba2_verify_slots))
        slots = [slot for _, slot in plain.written()]
        assert_same_bits("states", kv.as_vk()[slots], plain.tensors["states"][slots])


@pytest.mark.gpu
def test_graph_replay_equals_eager(device):
    case = make_slots_case(batch=4, nodes=4, tree=True, nheads=16, headdim=64, dstate=64, in_place=True, device=device)
    eager, captured = case.clone(), case.clone()
    expected = eager.run(mamba2_verify_slots)
    captured.run(mamba2_verify_slots)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = captured.run(mamba2_verify_slots)
    captured.tensors["states"].copy_(case.tensors["states"])
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits("y", y, expected)
    assert_same_bits("states", captured.tensors["states"], eager.tensors["states"])
