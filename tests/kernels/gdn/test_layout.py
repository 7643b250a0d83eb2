"""Slots in either layout: a batch of mixed ones gives what a batch that is all [V, K] does, K = V or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.gdn.reference import gdn_verify_slots_reference

from ..helpers import assert_same_bits, assert_same_numbers, rms_ratio
from .case import WINDOWS, Case, make_case
from .checks import FLOAT32_LIMIT, implementation
from .slots_case import make_slots_case, turned, turned_back

BOTH = pytest.mark.parametrize("which", ["triton", "reference"])
STATE = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = pytest.mark.parametrize(("K", "V"), [(16, 16), (40, 24), (17, 33), (128, 64)])


def slots_op(which: str) -> Callable[..., torch.Tensor]:
    if which == "reference":
        return gdn_verify_slots_reference
    from mamba_mtp_kernels.gdn.slots import gdn_verify_slots

    return gdn_verify_slots


def layouts_of(case: Case, bits: list[int]) -> torch.Tensor:
    """state_layout [S]: bits of the batch's slots; random ones elsewhere, where nothing may be read."""
    slots = case.books.slots.cpu().long()
    generator = torch.Generator().manual_seed(7)
    layout = torch.randint(0, 2, case.tensors["checkpoint"].shape[:1], generator=generator, dtype=torch.uint8)
    layout[slots[slots > 0]] = torch.tensor(bits, dtype=torch.uint8)[slots > 0]
    return layout.to(case.books.slots.device)


def turn_slots(pool: torch.Tensor, layout: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """change() every slot of pool [..., S, HV, V, K] whose bit is KV, in place."""
    axis = pool.dim() - 4
    for slot in (layout == KV).nonzero()[:, 0].tolist():
        pool.select(axis, slot).copy_(change(pool.select(axis, slot)))


def mixed(case: Case, bits: list[int]) -> tuple[Case, torch.Tensor]:
    """(a copy of the case with its states laid out by `bits`, state_layout)."""
    copy, layout = case.clone(), layouts_of(case, bits)
    turn_slots(copy.tensors["checkpoint"], layout, turned)
    return copy, layout


def verify_case(*, device: torch.device, **changes: object) -> Case:
    """Rows that fold (batch rows 2 to 4) beside rows that do not, padding between."""
    return make_case(
        **{
            "batch": 6, "nodes": 3, "tree": True, "H": 1, "HV": 2, "fold_threshold": 5, "pending": [0, 4, 6, 8, 7, 5],
            "padding": (4,), "strided": True, "device": device, **changes,
        }
    )  # fmt: skip


BITS = [VK, KV, KV, VK, KV, KV]


@BOTH
@STATE
@SIZES
def test_verify(which: str, K: int, V: int, state_dtype: torch.dtype, device: torch.device) -> None:
    """Outputs, windows and, turned back, checkpoints: those folded in place keep their layout."""
    verify = implementation(which, device)[0]
    plain = verify_case(K=K, V=V, state_dtype=state_dtype, device=device)
    ours, layout = mixed(plain, BITS)
    bits = layout.clone()
    expected, out = plain.run(verify), ours.run(verify, state_layout=layout)
    turn_slots(ours.tensors["checkpoint"], layout, turned_back)
    assert_same_numbers("o", out, expected)
    for name, tensor in plain.tensors.items():
        assert_same_numbers(name, ours.tensors[name], tensor)
    assert_same_bits("state_layout", layout, bits)


@BOTH
def test_verify_with_all_bits_vk(which: str, device: torch.device) -> None:
    verify = implementation(which, device)[0]
    plain = verify_case(device=device)
    ours, layout = mixed(plain, [VK] * 6)
    turn_slots(ours.tensors["checkpoint"], layout, turned_back)  # the spare slots': nothing but NaN
    assert_same_numbers("o", ours.run(verify, state_layout=torch.zeros_like(layout)), plain.run(verify))
    assert_same_numbers("checkpoint", ours.tensors["checkpoint"], plain.tensors["checkpoint"])


@BOTH
@STATE
@SIZES
@pytest.mark.parametrize("write_layout", [VK, KV], ids=["to VK", "to KV"])
def test_fold(
    which: str, write_layout: int, K: int, V: int, state_dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    """Settled in place (keeps its layout), snapshots and copies elsewhere (write_layout), nothing to do, padding."""
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
    layout = layouts_of(case, [VK, KV, KV, VK, KV, KV, KV, VK])
    plain = torch.stack([case.tensors["checkpoint"], case.tensors["checkpoint"].roll(1, -1)])
    ours = plain.clone()
    turn_slots(ours, layout, turned)
    arguments = {
        **{name: torch.stack([case.tensors[name], case.tensors[name].roll(1, -1)]) for name in WINDOWS},
        "order": books.order,
        "src_slots": src.to(device),
        "dst_slots": dst.to(device),
        "rows": books.rows,
        "counts": counts.to(device),
    }
    fold(plain, **arguments)
    fold(ours, **arguments, state_layout=layout, write_layout=write_layout)
    # what the caller does after a fold
    layout[dst[2:5].to(device)] = write_layout
    turn_slots(ours, layout, turned_back)
    assert_same_numbers("checkpoint", ours, plain)


@BOTH
@STATE
@SIZES
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("write_layout", [VK, KV], ids=["to VK", "to KV"])
def test_slots(
    which: str, write_layout: int, tree: bool, K: int, V: int, state_dtype: torch.dtype, device: torch.device
) -> None:
    """Read slots of both layouts, two of them among the row's own write slots (then of the layout written)."""
    shape = {
        "batch": 5, "nodes": 4, "tree": tree, "H": 1, "HV": 2, "K": K, "V": V, "state_dtype": state_dtype,
        "padding": (3,), "strided": True, "device": device,
    }  # fmt: skip
    for own_slot, layouts in ((False, [VK, KV, KV, VK, VK]), (True, [write_layout] * 5)):
        plain = make_slots_case(**shape, own_slot=own_slot)
        ours = make_slots_case(**shape, own_slot=own_slot, layouts=layouts, write_layout=write_layout)
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
        ours, layout = mixed(plain, BITS)
        layout[ours.books.slots[row].long()] ^= 1
        out = ours.run(verify, state_layout=layout).view(6, -1)
        assert rms_ratio(out[row], expected[row]) > 1000 * FLOAT32_LIMIT

    ours, layout = mixed(plain, BITS)
    slot = int(ours.books.slots[2])
    states = []
    for flip in (0, 1):
        layout[slot] ^= flip
        pool = ours.tensors["checkpoint"].clone()[None]
        fold(
            pool,
            **{name: ours.tensors[name][None] for name in WINDOWS},
            order=ours.books.order,
            src_slots=ours.books.slots[2:3],
            dst_slots=ours.books.slots[2:3],
            rows=ours.books.rows[2:3],
            counts=ours.books.pending[slot : slot + 1],
            state_layout=layout,
        )
        states.append(pool[0, slot])
    assert rms_ratio(states[1], states[0]) > 1000 * FLOAT32_LIMIT

    case = make_slots_case(batch=2, K=16, V=24, layouts=[VK, KV], write_layout=KV, device=device)
    outputs = []
    for flip in (0, 1):
        copy = case.clone()
        copy.state_layout[copy.read_slots[1].long()] ^= flip
        outputs.append(copy.run(slots_op(which)).view(2, -1)[1])
    assert rms_ratio(outputs[1], outputs[0]) > 1000 * FLOAT32_LIMIT


def test_rejected_arguments(device: torch.device) -> None:
    verify, fold = implementation("triton", device)
    case = verify_case(device=device)
    slots = case.books.slots
    layout = torch.zeros(case.tensors["checkpoint"].shape[0], dtype=torch.uint8, device=device)
    for wrong in (layout[:-1], layout.int()):
        with pytest.raises((ValueError, TypeError), match="state_layout"):
            case.run(verify, state_layout=wrong)
    arguments = {
        **{name: case.tensors[name][None] for name in WINDOWS},
        "order": case.books.order, "src_slots": slots, "dst_slots": slots, "rows": slots, "counts": slots,
    }  # fmt: skip
    with pytest.raises(ValueError, match="write_layout: 7"):
        fold(case.tensors["checkpoint"][None], **arguments, state_layout=layout, write_layout=7)
    with pytest.raises(ValueError, match="without a state_layout"):
        fold(case.tensors["checkpoint"][None], **arguments, write_layout=KV)
