"""GDN kernels on a GPU at the sizes they are for: every configuration, stock's error, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.common.operands import Folds, States

from ..helpers import assert_same_bits, assert_same_numbers, rms_ratio
from .case import Case, make_case
from .checks import check_verify
from .slots_case import SlotsCase, check_slots, make_slots_case, turned, turned_back
from .stock import stock_module, stock_verify, stock_version
from .test_axis_order import mixed, turn_slots

pytestmark = pytest.mark.gpu

QWEN3_NEXT = {"H": 16, "HV": 32, "K": 128, "V": 128}


def real_case(nodes: int, *, tree: bool = True, state_dtype: torch.dtype = torch.float32, **more: object) -> Case:
    return make_case(
        batch=6, nodes=nodes, tree=tree, dtype=torch.bfloat16, state_dtype=state_dtype, padding=(2,), strided=True,
        device="cuda", **{**QWEN3_NEXT, "fold_threshold": 16, "pending": [0, 1, 0, 15, 16, 16 + nodes], **more},
    )  # fmt: skip


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 4, 8, 16, 32])
def test_real_sizes(nodes: int, tree: bool, state_dtype: torch.dtype) -> None:
    from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

    check_verify(real_case(nodes, tree=tree, state_dtype=state_dtype), gdn_verify)


@pytest.mark.parametrize("products", [True, False], ids=["products", "sums"])
@pytest.mark.parametrize("heads", [192, 2048])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_sizes_around_half_a_tile(state_dtype: torch.dtype, heads: int, products: bool) -> None:
    """Windows of 20 tokens beside 16 nodes, in the launch shapes for few heads and for many, by both first kernels."""
    from mamba_mtp_kernels.gdn.verify_replay import default_config, gdn_verify

    config = default_config(
        nodes=16, values=128, exact=False, fold_threshold=20, heads=heads, narrow=state_dtype == torch.bfloat16,
        products=products,
    )  # fmt: skip
    for pending, newest in ([16, 17, 0, 20, 25, 36], [0, 3, 0, 9, 9, 17]), ([0, 9, 0, 18, 27, 36], [0, 9, 0, 9, 9, 4]):
        case = real_case(16, state_dtype=state_dtype, fold_threshold=20, pending=pending, newest=newest)
        check_verify(case, gdn_verify, config=config)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_v": 16, "blocks": 8},
        {"block_v": 16, "blocks": 8, "num_warps": 1},
        {"block_v": 32, "blocks": 4},
        {"block_v": 64, "blocks": 2, "num_warps": 4},
        {"blocks": 1, "num_stages": 1, "fold_stages": 1},
        {"num_stages": 3},
        {"fold_stages": 1},
        {"fold_stages": 3},
        {"split": False},
        {"query_chunk": 32},
        {"query_chunk": 128, "prepare_warps": 4},
        {"prepare_warps": 2},
        {"registers": 168},
        {"group": 1},
        {"group": 4},
        {"overlap": True},
        {"overlap": True, "blocks": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [8, 16])
def test_configurations(changes: dict[str, int], window: int) -> None:
    """No configuration changes more than rounding."""
    from mamba_mtp_kernels.gdn.verify_replay import default_config, gdn_verify

    config = default_config(nodes=8, values=128, exact=False, fold_threshold=window)
    case = real_case(8, fold_threshold=window, pending=[0, 1, 0, window - 1, window, window + 8])
    check_verify(case, gdn_verify, config=replace(config, **changes))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [8, 16])
def test_fold_has_the_same_bits_in_every_tile(state_dtype: torch.dtype, window: int) -> None:
    """A verify that folds, however it is cut up, leaves what gdn_fold leaves."""
    from mamba_mtp_kernels.gdn.fold import gdn_fold
    from mamba_mtp_kernels.gdn.verify_replay import default_config, gdn_verify

    case = make_case(
        batch=17, nodes=4, dtype=torch.bfloat16, state_dtype=state_dtype, pending=[window + 4] * 17,
        fold_threshold=window, device="cuda", **QWEN3_NEXT,
    )  # fmt: skip
    books, slots = case.books, case.books.slots.long()
    base = default_config(nodes=4, values=128, exact=False, fold_threshold=window)
    # (from 64 rows and four warps on, tensor cores of another kind sum in another order)
    cuts = [(16, 8, 1), (16, 8, 2), (16, 1, 1), (16, 8, 4), (32, 4, 2), (32, 2, 1)]
    for rows in (slice(0, 17), slice(0, 2)):
        settled = case.clone()
        counts = torch.full_like(books.slots[rows], books.folding(0))
        settled.fold(gdn_fold, replace(books.settling(rows), counts=counts))
        want = settled.tensors["checkpoint"][slots[rows]]
        for config in (
            None,
            *(replace(base, block_v=v, blocks=blocks, num_warps=warps) for v, blocks, warps in cuts),
            replace(base, fold_stages=1),
            replace(base, prepare_warps=2),
        ):
            folded = case.clone()
            folded.run(gdn_verify, config=config)
            assert_same_bits(f"checkpoint, {config}", folded.tensors["checkpoint"][slots[rows]], want)


def test_bf16_halves_lose_nothing_that_matters() -> None:
    """Before its output is rounded, the two-halves product is far closer than bf16: seen through float32 outputs."""
    from mamba_mtp_kernels.gdn.verify_replay import default_config, gdn_verify

    case = make_case(batch=2, nodes=8, pending=[3, 20], fold_threshold=16, device="cuda", **QWEN3_NEXT)
    expected, _ = case.oracle()
    config = default_config(nodes=8, values=128, exact=False, fold_threshold=16)
    assert rms_ratio(case.run(gdn_verify, config=config), expected) < 2e-5


def test_graph_replay_equals_eager() -> None:
    """One captured graph, replayed on new inputs and counts written into its buffers."""
    from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

    static = real_case(8, seed=1)
    saved = static.clone()
    static.run(gdn_verify)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.verify(gdn_verify)
    for seed, pending in ((1, [0, 1, 0, 15, 16, 24]), (2, [17, 3, 5, 0, 24, 9])):
        fresh = saved if seed == 1 else real_case(8, seed=seed, pending=pending)
        for name, tensor in fresh.tensors.items():
            static.tensors[name].copy_(tensor)
        for name in ("slots", "rows", "pending", "order", "ancestors"):
            getattr(static.books, name).copy_(getattr(fresh.books, name))
        static.put_nodes()
        graph.replay()
        eager = fresh.clone()
        assert_same_bits("o", out, eager.run(gdn_verify))
        for name, tensor in eager.tensors.items():
            assert_same_bits(name, static.tensors[name], tensor)


def test_repeated_runs_agree() -> None:
    """The same case gives the same bits: nothing races."""
    from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

    case = real_case(16)
    first = case.clone()
    out = first.run(gdn_verify)
    for _ in range(20):
        again = case.clone()
        assert_same_bits("o", again.run(gdn_verify), out)
        for name, tensor in again.tensors.items():
            assert_same_bits(name, tensor, first.tensors[name])


SLOTS_CASES = pytest.mark.parametrize(("batch", "nodes"), [(6, 1), (6, 4), (3, 8), (3, 16), (70, 2)])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@SLOTS_CASES
def test_slots_have_the_bits_of_stock(
    batch: int, nodes: int, dtype: torch.dtype, tree: bool, state_dtype: torch.dtype
) -> None:
    """The same bits from slots read and written as [V, K], a root's and another node's where it is read from; the same
    numbers where slots may be turned."""
    from mamba_mtp_kernels.gdn.verify_slots import gdn_verify_slots

    module = stock_module()
    sizes = {
        "batch": batch, "nodes": nodes, "tree": tree, "dtype": dtype, "state_dtype": state_dtype, "device": "cuda",
        **QWEN3_NEXT,
    }  # fmt: skip
    for own_slot in (False, True):
        case = make_slots_case(**sizes, own_slot=own_slot)
        theirs, states = stock_verify(module, case)
        assert_same_bits("o", case.run(gdn_verify_slots, sglang=stock_version()), theirs)
        assert_same_bits("states", case.states_written(), states)
        case = make_slots_case(**sizes, own_slot=own_slot, orders=[VK] * batch)
        assert_same_numbers("o", case.run(gdn_verify_slots), theirs)
        assert_same_numbers("states", case.states_written(), states)


@pytest.mark.parametrize("shape", [{"H": 2, "HV": 4, "K": 64, "V": 64}, {"H": 2, "HV": 6, "K": 128, "V": 64}], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_of_other_sizes(shape: dict[str, int], tree: bool, state_dtype: torch.dtype) -> None:
    from mamba_mtp_kernels.gdn.verify_slots import gdn_verify_slots

    module = stock_module()
    sizes = {"batch": 5, "nodes": 5, "tree": tree, "state_dtype": state_dtype, "device": "cuda", **shape}
    theirs, states = stock_verify(module, make_slots_case(**sizes))
    for orders in (None, [VK] * 5):
        ours = make_slots_case(**sizes, orders=orders)
        assert_same_numbers("o", ours.run(gdn_verify_slots), theirs)
        assert_same_numbers("states", ours.states_written(), states)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_slots_real_sizes(tree: bool, state_dtype: torch.dtype) -> None:
    """Against float64, from slots of both orders to slots of both orders, then where a row reads what it writes."""
    from mamba_mtp_kernels.gdn.verify_slots import gdn_verify_slots

    shape = {
        "batch": 6, "nodes": 8, "tree": tree, "dtype": torch.bfloat16, "state_dtype": state_dtype, "padding": (2,),
        "strided": True, "device": "cuda", **QWEN3_NEXT,
    }  # fmt: skip
    for own_slot in (False, True):
        case = make_slots_case(**shape, own_slot=own_slot, orders=[VK, KV, VK, KV, KV, VK])
        first = case.clone()
        out = check_slots(first, gdn_verify_slots, stored=True)
        for _ in range(10):
            again = case.clone()
            assert_same_bits("o", again.run(gdn_verify_slots), out)
            assert_same_bits("states", again.states, first.states)


def test_slots_graph_replay_equals_eager() -> None:
    """One captured graph, replayed on the inputs and slots of another batch."""
    from mamba_mtp_kernels.gdn.verify_slots import gdn_verify_slots

    def fresh(seed: int, padding: tuple[int, ...]) -> SlotsCase:
        return make_slots_case(
            batch=6, nodes=4, tree=True, dtype=torch.bfloat16, padding=padding, orders=[VK, KV] * 3,
            device="cuda", seed=seed, **QWEN3_NEXT,
        )  # fmt: skip

    static = fresh(1, ())
    static.clone().run(gdn_verify_slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.run(gdn_verify_slots)
    for seed, padding in ((2, (5,)), (3, (0, 3))):
        eager = fresh(seed, padding)
        for name, tensor in vars(eager).items():
            if isinstance(tensor, torch.Tensor):
                getattr(static, name).copy_(tensor)
        graph.replay()
        assert_same_bits("o", out, eager.run(gdn_verify_slots))
        assert_same_bits("states", static.states, eager.states)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [6, 24], ids=["small tiles", "large tiles"])
def test_mixed_orders_equal_one(batch: int, state_dtype: torch.dtype) -> None:
    """Verify and fold at real sizes: neither the orders nor their being told changes a state or an output."""
    from mamba_mtp_kernels.gdn.fold import gdn_fold
    from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

    bits = [VK, KV, KV, VK, KV, KV] * (batch // 6)
    plain = make_case(
        batch=batch, nodes=8, tree=True, dtype=torch.bfloat16, state_dtype=state_dtype, padding=(2,), device="cuda",
        fold_threshold=16, pending=[0, 1, 0, 15, 17, 24] * (batch // 6), **QWEN3_NEXT,
    )  # fmt: skip
    ours, order = mixed(plain, bits)
    zero = plain.clone()
    states, expected = plain.tensors["checkpoint"].clone(), plain.run(gdn_verify)
    assert_same_numbers("o, all VK", zero.run(gdn_verify, axis_order=torch.zeros_like(order)), expected)
    assert_same_numbers("checkpoint, all VK", zero.tensors["checkpoint"], plain.tensors["checkpoint"])
    assert_same_numbers("o", ours.run(gdn_verify, axis_order=order), expected)
    turn_slots(ours.tensors["checkpoint"], order, turned_back)
    assert_same_numbers("checkpoint", ours.tensors["checkpoint"], plain.tensors["checkpoint"])

    books = plain.books
    live = books.slots > 0
    src = books.slots[live]
    dst = src.clone()
    # a snapshot to a slot of nobody, the others settled where they are
    dst[-1] = next(slot for slot in range(1, states.shape[0]) if slot not in src.tolist())
    window = plain.window(lambda x: x[None])
    folds = Folds(src, dst, books.rows[live], books.pending[src.long()])
    settled = states.clone()
    gdn_fold(States(settled[None]), window, folds)
    for write in (VK, KV):
        pool, after = states.clone(), order.clone()
        turn_slots(pool, order, turned)
        gdn_fold(States(pool[None], order, write), window, folds)
        after[dst[-1].long()] = write
        turn_slots(pool, after, turned_back)
        assert_same_numbers("folded", pool, settled)


def test_more_states_than_a_short_grid_axis_holds() -> None:
    """1,024 rows of 64 value heads, folds among them: axes 1 and 2 of a launch end at 65,535."""
    from mamba_mtp_kernels.gdn.fold import gdn_fold
    from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

    case = make_case(
        batch=1024, nodes=2, H=32, HV=64, K=16, V=16, fold_threshold=2, pending=[0, 1, 2, 4] * 256, device="cuda"
    )
    check_verify(case.clone(), gdn_verify)
    settled = case.clone()
    settled.fold(gdn_fold, settled.books.settling())
    few = case.clone()
    few.fold(gdn_fold, few.books.settling(slice(1000, 1024)))
    last = case.books.slots[1000:].long()
    assert_same_bits("states of the last rows", settled.tensors["checkpoint"][last], few.tensors["checkpoint"][last])
    assert not torch.equal(settled.tensors["checkpoint"][last], case.tensors["checkpoint"][last])
