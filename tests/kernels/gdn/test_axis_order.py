"""Slots in either axis order: a batch of mixed ones gives what a batch that is all [V, K] does, K = V or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.gdn.reference import gdn_verify_slots_reference

from ..helpers import assert_same_bits, assert_same_numbers, rms_ratio
from .case import Case, make_case
from .checks import FLOAT32_LIMIT, implementation
from .slots_case import make_slots_case, turned, turned_back

pytestmark = pytest.mark.in_turn

BOTH = pytest.mark.parametrize("which", ["triton", "reference"])
STATE = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = pytest.mark.parametrize(
    ("K", "V"), [(16, 16), (72, 24), (17, 33), (192, 16), pytest.param(128, 128, marks=pytest.mark.once)]
)


def slots_op(which: str) -> Callable[..., torch.Tensor]:
    if which == "reference":
        return gdn_verify_slots_reference
    from mamba_mtp_kernels.gdn.verify_slots import gdn_verify_slots

    return gdn_verify_slots


def order_of(case: Case, bits: list[int]) -> torch.Tensor:
    """axis_order [S]: bits of the batch's slots; random ones elsewhere, where nothing may be read."""
    slots = case.books.slots.cpu().long()
    generator = torch.Generator().manual_seed(7)
    order = torch.randint(0, 2, case.tensors["checkpoint"].shape[:1], generator=generator, dtype=torch.uint8)
    order[slots[slots > 0]] = torch.tensor(bits, dtype=torch.uint8)[slots > 0]
    return order.to(case.books.slots.device)


def turn_slots(pool: torch.Tensor, order: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """change() every slot of pool [..., S, HV, V, K] whose bit is KV, in place."""
    axis = pool.dim() - 4
    for slot in (order == KV).nonzero()[:, 0].tolist():
        pool.select(axis, slot).copy_(change(pool.select(axis, slot)))


def mixed(case: Case, bits: list[int]) -> tuple[Case, torch.Tensor]:
    """(a copy of the case whose states lie as `bits` say, axis_order)."""
    copy, order = case.clone(), order_of(case, bits)
    turn_slots(copy.tensors["checkpoint"], order, turned)
    return copy, order


def verify_case(*, device: torch.device, **changes: object) -> Case:
    """Rows that fold (batch rows 2 to 4) beside rows that do not, padding between."""
    return make_case(
        **{
            "batch": 6, "nodes": 3, "tree": True, "H": 1, "HV": 2, "fold_threshold": 5, "pending": [0, 4, 6, 8, 7, 5],
            "padding": (4,), "strided": True, "device": device, **changes,
        }
    )  # fmt: skip


BITS = [VK, KV, KV, VK, KV, KV]


@pytest.mark.in_turn
@BOTH
@STATE
@SIZES
def test_verify(which: str, K: int, V: int, state_dtype: torch.dtype, device: torch.device) -> None:
    """Outputs, windows and, turned back, checkpoints: those folded in place keep their order."""
    verify = implementation(which, device)[0]
    plain = verify_case(K=K, V=V, state_dtype=state_dtype, device=device)
    ours, order = mixed(plain, BITS)
    bits = order.clone()
    expected, out = plain.run(verify), ours.run(verify, axis_order=order)
    turn_slots(ours.tensors["checkpoint"], order, turned_back)
    assert_same_numbers("o", out, expected)
    for name, tensor in plain.tensors.items():
        assert_same_numbers(name, ours.tensors[name], tensor)
    assert_same_bits("axis_order", order, bits)


@BOTH
def test_verify_with_all_bits_vk(which: str, device: torch.device) -> None:
    verify = implementation(which, device)[0]
    plain = verify_case(device=device)
    ours, order = mixed(plain, [VK] * 6)
    turn_slots(ours.tensors["checkpoint"], order, turned_back)  # the spare slots': nothing but NaN
    assert_same_numbers("o", ours.run(verify, axis_order=torch.zeros_like(order)), plain.run(verify))
    assert_same_numbers("checkpoint", ours.tensors["checkpoint"], plain.tensors["checkpoint"])


@pytest.mark.in_turn
@BOTH
@STATE
@SIZES
@pytest.mark.parametrize("write", [VK, KV], ids=["to VK", "to KV"])
def test_fold(
    which: str, write: int, K: int, V: int, state_dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    """Settled in place (keeps its order), snapshots and copies elsewhere (write), nothing to do, padding."""
    fold = implementation(which, device)[1]
    case = make_case(
        batch=8, nodes=3, H=1, HV=2, K=K, V=V, fold_threshold=5, pending=[5, 8, 6, 3, 0, 0, 4, 7],
        state_dtype=state_dtype, device=device,
    )  # fmt: skip
    books = case.books
    slots = books.slots.cpu().long()
    src, dst, counts = slots.clone(), slots.clone(), books.pending.cpu()[slots]
    spare = [slot for slot in range(1, books.pending.shape[0]) if slot not in slots.tolist()]
    dst[2], dst[3], dst[4] = spare[0], spare[1], spare[2]
    src[6] = 0
    order = order_of(case, [VK, KV, KV, VK, KV, KV, KV, VK])
    plain = torch.stack([case.tensors["checkpoint"], case.tensors["checkpoint"].roll(1, -1)])
    ours = plain.clone()
    turn_slots(ours, order, turned)
    window = case.window(lambda x: torch.stack([x, x.roll(1, -1)]))
    folds = Folds(src.to(device), dst.to(device), books.rows, counts.to(device))
    fold(States(plain), window, folds)
    fold(States(ours, order, write), window, folds)
    # what the caller does after a fold
    order[dst[2:5].to(device)] = write
    turn_slots(ours, order, turned_back)
    assert_same_numbers("checkpoint", ours, plain)


@pytest.mark.in_turn
@BOTH
@STATE
@SIZES
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_slots(which: str, tree: bool, K: int, V: int, state_dtype: torch.dtype, device: torch.device) -> None:
    """Slots of both orders, read and written as they lie; then rows whose read slot is one of their write slots, the
    root's and others'."""
    shape = {
        "batch": 5, "nodes": 4, "tree": tree, "H": 1, "HV": 2, "K": K, "V": V, "state_dtype": state_dtype,
        "padding": (3,), "strided": True, "device": device,
    }  # fmt: skip
    for own_slot in (False, True):
        plain = make_slots_case(**shape, own_slot=own_slot)
        ours = make_slots_case(**shape, own_slot=own_slot, orders=[VK, KV, KV, VK, VK])
        plain_states = plain.states.clone()
        assert_same_numbers("o", ours.run(slots_op(which)), plain.run(slots_op(which)))
        assert_same_numbers("states", ours.states_written(), plain.states_written())
        others = torch.ones(plain.states.shape[0], dtype=torch.bool)
        others[plain.written().reshape(-1)] = False
        others[plain.read_slots[plain.read_slots > 0].cpu().long()] = False
        assert_same_bits("slots of nobody", ours.states[others.to(device)], plain_states[others.to(device)])


@BOTH
def test_a_wrong_bit_is_noticed(which: str, device: torch.device) -> None:
    """One bit flipped, of a row that folds, of one that does not, of a fold's source, of a slot read in slots mode."""
    verify, fold = implementation(which, device)
    plain = verify_case(K=16, V=24, device=device)
    expected = plain.clone().run(verify).view(6, -1)
    for row in (1, 2):
        ours, order = mixed(plain, BITS)
        order[ours.books.slots[row].long()] ^= 1
        out = ours.run(verify, axis_order=order).view(6, -1)
        assert rms_ratio(out[row], expected[row]) > 1000 * FLOAT32_LIMIT

    ours, order = mixed(plain, BITS)
    slot = int(ours.books.slots[2])
    states = []
    for flip in (0, 1):
        order[slot] ^= flip
        copy = ours.clone()
        copy.fold(fold, copy.books.settling(slice(2, 3)), order)
        states.append(copy.tensors["checkpoint"][slot])
    assert rms_ratio(states[1], states[0]) > 1000 * FLOAT32_LIMIT

    case = make_slots_case(batch=2, K=16, V=24, orders=[VK, KV], device=device)
    outputs = []
    for flip in (0, 1):
        copy = case.clone()
        copy.axis_order[copy.read_slots[1].long()] ^= flip
        outputs.append(copy.run(slots_op(which)).view(2, -1)[1])
    assert rms_ratio(outputs[1], outputs[0]) > 1000 * FLOAT32_LIMIT


def test_rejected_arguments(device: torch.device) -> None:
    """An order of another number of slots; what States refuses by itself is common/test_operands.py's."""
    verify = implementation("triton", device)[0]
    case = verify_case(device=device)
    order = torch.zeros(case.tensors["checkpoint"].shape[0] - 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="axis_order: shape"):
        case.run(verify, axis_order=order)
