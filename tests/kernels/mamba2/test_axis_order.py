"""Axis orders in mamba2_verify and mamba2_fold: slots of both kinds in one batch, told apart by their bits alone."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.mamba2.fold import mamba2_fold
from mamba_mtp_kernels.mamba2.reference import mamba2_fold_reference, mamba2_verify_reference
from mamba_mtp_kernels.mamba2.verify_replay import mamba2_verify

from ..helpers import assert_close, assert_same_bits, assert_same_numbers
from .case import Case, make_case
from .slots_case import turn
from .test_fold import Case as FoldCase

pytestmark = pytest.mark.in_turn

VERIFIES = [pytest.param(mamba2_verify, id="kernel"), pytest.param(mamba2_verify_reference, id="reference")]
FOLDS = [pytest.param(mamba2_fold, id="kernel"), pytest.param(mamba2_fold_reference, id="reference")]
HEADS = [(12, 16), (20, 24), (16, 192), pytest.param(64, 16, marks=pytest.mark.once), (16, 64)]  # headdim, dstate


def mixed(case: Case, rows: tuple[int, ...]) -> tuple[Case, torch.Tensor, list[int]]:
    """The case with these batch rows' checkpoints laid as KV, its axis_order, and their slots."""
    case = case.clone()
    slots = case.books.slots[list(rows)].tolist()
    turn(case.tensors["checkpoint"], slots)
    order = torch.full((case.tensors["checkpoint"].shape[0],), VK, dtype=torch.uint8, device=case.books.slots.device)
    order[slots] = KV
    return case, order, slots


def same_as_vk(case: Case, op, rows: tuple[int, ...]) -> None:
    plain = case.clone()
    turned, order, slots = mixed(case, rows)
    bits = order.clone()
    assert_same_numbers("y", turned.run(op, axis_order=order), plain.run(op))
    turn(turned.tensors["checkpoint"], slots, back=True)  # a fold in place kept its order
    for name in ("checkpoint", "window_x", "window_B", "window_dt"):
        assert_same_numbers(name, turned.tensors[name], plain.tensors[name])
    assert_same_bits("axis_order", order, bits)


@pytest.mark.in_turn
@pytest.mark.parametrize("op", VERIFIES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("headdim", "dstate"), HEADS)
def test_verify_of_mixed_orders_equals_vk(op, state_dtype, headdim, dstate, device):
    """Rows of either order, with and without pending tokens, folding and not, and a padding row."""
    case = make_case(
        batch=7,
        nodes=3,
        tree=True,
        nheads=2,
        headdim=headdim,
        dstate=dstate,
        pending=[0, 0, 4, 4, 9, 9, 2],
        padding=(6,),
        state_dtype=state_dtype,
        strided=True,
        device=device,
    )
    same_as_vk(case, op, (0, 2, 4))


def test_all_vk_by_bits_equals_none(device):
    case = make_case(batch=3, nodes=4, pending=[0, 5, 9], device=device)
    same_as_vk(case, mamba2_verify, ())
    same_as_vk(case, mamba2_verify, (0, 1, 2))


@pytest.mark.parametrize("op", VERIFIES)
@pytest.mark.parametrize("pending", [2, 9], ids=["streamed", "folded"])
def test_a_wrong_bit_is_seen_in_verify(op, pending, device):
    case = make_case(batch=2, nodes=3, pending=[pending, pending], device=device)
    expected, _ = case.clone().oracle()
    turned, order, slots = mixed(case, (1,))
    order[slots] = VK
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("y", turned.run(op, axis_order=order), expected, 1e-2)


def run_fold(case: FoldCase, op, order: torch.Tensor, write: int) -> torch.Tensor:
    return case.run(op, axis_order=order.to(case.device), write=write)


@pytest.mark.in_turn
@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("write", [VK, KV], ids=["writes VK", "writes KV"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("headdim", "dstate"), HEADS)
def test_fold_of_mixed_orders_equals_vk(op, write, state_dtype, headdim, dstate, device):
    """In place, to another slot, a plain copy; from either order."""
    jobs = [(1, 1, 0, 5), (2, 2, 1, 3), (3, 6, 2, 4), (4, 7, 3, 2), (5, 8, 99999, 0), (0, 5, 3, 2)]
    options = {"headdim": headdim, "dstate": dstate, "state_dtype": state_dtype, "strided": True, "device": device}
    expected = FoldCase(jobs, **options).run(op)
    case = FoldCase(jobs, **options)
    turn(case.checkpoint, [1, 3, 5])
    order = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.uint8)  # what targets held does not matter
    actual = run_fold(case, op, order, write)
    now_kv = [1, 3, 5] + ([6, 7, 8] if write == KV else [])
    turn(actual, now_kv, back=True)
    assert_same_numbers("checkpoint", actual, expected)


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("wrong", ["source bit", "write"])
def test_a_wrong_order_is_seen_in_fold(op, wrong, device):
    case = FoldCase([(1, 6, 0, 5), (2, 2, 1, 3)], device=device)
    expected = case.run(mamba2_fold_reference, exact=True)
    order = torch.zeros(9, dtype=torch.uint8)
    if wrong == "source bit":
        order[1] = KV
    actual = run_fold(case, op, order, KV if wrong == "write" else VK)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("state", actual[:, 6], expected[:, 6], 1e-2)
    assert_close("state", actual[:, 2], expected[:, 2], 6e-7)


def test_errors_name_the_argument(device):
    case = FoldCase([(1, 6, 0, 5)], device=device)
    with pytest.raises(ValueError, match=r"axis_order: shape \(3,\), expected \[S=9\]"):
        run_fold(case, mamba2_fold, torch.zeros(3, dtype=torch.uint8), VK)
    with pytest.raises(TypeError, match=r"axis_order: dtype torch\.int64"):
        run_fold(case, mamba2_fold, torch.zeros(9, dtype=torch.int64), VK)
    with pytest.raises(ValueError, match="write: 2"):
        run_fold(case, mamba2_fold, torch.zeros(9, dtype=torch.uint8), 2)
    verify = make_case(device=device)
    with pytest.raises(ValueError, match="axis_order: shape"):
        verify.run(mamba2_verify, axis_order=torch.zeros(1, dtype=torch.uint8, device=device))


def test_turning_there_and_back():
    """The tests' own helper, element by element."""
    pool = torch.arange(2 * 3 * 2 * 4, dtype=torch.float32).view(2, 3, 2, 4)
    turned = pool.clone()
    turn(turned, [1])
    assert turned[1].view(3, 4, 2)[2, 3, 1] == pool[1, 2, 1, 3] and torch.equal(turned[0], pool[0])
    turn(turned, [1], back=True)
    assert_same_bits("pool", turned, pool)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize(
    ("nheads", "headdim", "ngroups", "dstate"), [(128, 80, 8, 128), (64, 64, 8, 128), (48, 64, 1, 256)]
)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_model_shapes(nodes, nheads, headdim, ngroups, dstate, state_dtype, device):
    case = make_case(
        batch=6,
        nodes=nodes,
        tree=True,
        nheads=nheads,
        headdim=headdim,
        ngroups=ngroups,
        dstate=dstate,
        fold_threshold=16,
        pending=[0, 3, 16, 17, 16 + nodes, 9],
        dtype=torch.bfloat16,
        state_dtype=state_dtype,
        device=device,
    )
    same_as_vk(case, mamba2_verify, (0, 2, 4))
