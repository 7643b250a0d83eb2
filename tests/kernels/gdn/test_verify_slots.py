"""gdn_verify_slots: the float64 recurrence, SGLang's own kernel bit for bit, and what it may not touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.gdn.reference import gdn_verify_slots_reference

from ..helpers import assert_same_bits, assert_same_numbers, rms_ratio
from .checks import FLOAT32_LIMIT
from .slots_case import SlotsCase, check_slots, make_slots_case, oracle
from .stock import normalise_as, stock_module, stock_verify, stock_version

BOTH = pytest.mark.parametrize("which", ["triton", "reference"])
TREE = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
STATE = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)


def implementation(which: str) -> Callable[..., torch.Tensor]:
    if which == "reference":
        return gdn_verify_slots_reference
    from mamba_mtp_kernels.gdn.verify_slots import gdn_verify_slots

    return gdn_verify_slots


def check(which: str, case: SlotsCase, **extra: object) -> torch.Tensor:
    return check_slots(case, implementation(which), stored=which == "triton", **extra)


@BOTH
@TREE
@pytest.mark.parametrize("nodes", range(1, 17))
def test_nodes(which: str, nodes: int, tree: bool, device: torch.device) -> None:
    check(which, make_slots_case(batch=2, nodes=nodes, tree=tree, H=1, HV=2, seed=nodes, device=device))


@BOTH
@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (1, 2), (2, 4), (1, 4)])
def test_head_groups(which: str, H: int, HV: int, device: torch.device) -> None:
    check(which, make_slots_case(batch=2, nodes=3, H=H, HV=HV, device=device))


@BOTH
@TREE
@pytest.mark.parametrize(("K", "V"), [(16, 16), (8, 24), (40, 96), (96, 40), (33, 17), (128, 64), (128, 128)])
def test_head_sizes(which: str, K: int, V: int, tree: bool, device: torch.device) -> None:
    check(which, make_slots_case(batch=2, nodes=3, tree=tree, H=1, HV=2, K=K, V=V, device=device))


@BOTH
@TREE
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(which: str, dtype: torch.dtype, state_dtype: torch.dtype, tree: bool, device: torch.device) -> None:
    check(which, make_slots_case(tree=tree, H=1, HV=2, dtype=dtype, state_dtype=state_dtype, device=device))


@BOTH
@TREE
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("own_slot", [False, True], ids=["other slot", "own slot"])
def test_slots(which: str, own_slot: bool, index_dtype: torch.dtype, tree: bool, device: torch.device) -> None:
    """A row may read one of its own write slots; padding rows between, a strided pool, poison all around."""
    case = make_slots_case(
        batch=6, nodes=4, tree=tree, H=1, HV=2, padding=(1, 4), own_slot=own_slot, index_dtype=index_dtype,
        strided=True, device=device,
    )  # fmt: skip
    check(which, case)


@BOTH
def test_index_rows_may_be_views(which: str, device: torch.device) -> None:
    """Write slots and parents as rows of wider, longer buffers."""
    case = make_slots_case(tree=True, device=device)
    for name in ("write_slots", "parents"):
        tensor = getattr(case, name)
        wide = torch.full((tensor.shape[0] + 2, tensor.shape[1] + 3), -99, dtype=tensor.dtype, device=device)
        wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        setattr(case, name, wide[:, : tensor.shape[1]])
    narrow = make_slots_case(tree=True, device=device)
    assert_same_bits("o", case.run(implementation(which)), narrow.run(implementation(which)))
    assert_same_bits("states", case.states, narrow.states)


@BOTH
def test_only_padding_rows(which: str, device: torch.device) -> None:
    check(which, make_slots_case(batch=2, padding=(0, 1), device=device))


@BOTH
def test_nodes_without_a_slot_are_not_written(which: str, device: torch.device) -> None:
    case = make_slots_case(device=device)
    full = case.clone()
    case.write_slots[0, 2], case.write_slots[1, 0] = 0, -1
    before = case.clone()
    assert_same_bits("o", case.run(implementation(which)), full.run(implementation(which)))
    kept = [int(full.write_slots[0, 2]), int(full.write_slots[1, 0])]
    others = [slot for slot in range(case.states.shape[0]) if slot not in kept]
    assert_same_bits("skipped", case.states[kept], before.states[kept])
    assert_same_bits("written", case.states[others], full.states[others])


@BOTH
@pytest.mark.parametrize("gate_shift", [10.0, 60.0, 1000.0])
def test_strong_decay(which: str, gate_shift: float, device: torch.device) -> None:
    check(which, make_slots_case(tree=True, gate_shift=gate_shift, device=device))


@BOTH
@STATE
def test_tree_that_is_a_chain(which: str, state_dtype: torch.dtype, device: torch.device) -> None:
    """In float32 the same; a bf16 tree goes on from rounded states, at SGLang as here."""
    chain = make_slots_case(batch=2, nodes=5, state_dtype=state_dtype, device=device)
    tree = chain.clone()
    tree.parents = torch.arange(-1, 4, dtype=torch.int32, device=device).expand(2, 5).contiguous()
    ours, theirs = check(which, chain), check(which, tree)
    if state_dtype == torch.float32 or which == "reference":
        assert_same_numbers("o", theirs, ours)
        assert_same_numbers("states", tree.states, chain.states)


@BOTH
def test_two_steps_equal_one(which: str, device: torch.device) -> None:
    """A verify that goes on from the slot of an accepted node gives what one verify over all nodes gives."""
    long = make_slots_case(batch=2, nodes=6, device=device)
    steps = long.clone()
    out = check(which, long).view(2, 6, -1)
    part = {
        name: getattr(steps, name).view(2, 6, *getattr(steps, name).shape[1:]) for name in ("q", "k", "v", "a", "b")
    }
    read = steps.read_slots
    for start, stop in ((0, 2), (2, 6)):
        inputs = {name: x[:, start:stop].flatten(0, 1) for name, x in part.items()}
        step = replace(steps, **inputs, read_slots=read, write_slots=steps.write_slots[:, start:stop].contiguous())
        got = step.run(implementation(which)).view(2, stop - start, -1)
        if which == "triton":
            assert_same_bits("o", got, out[:, start:stop])
        assert rms_ratio(got, out[:, start:stop]) < FLOAT32_LIMIT
        read = steps.write_slots[:, stop - 1].contiguous()
    if which == "triton":
        assert_same_bits("states", steps.states, long.states)


@pytest.mark.in_turn
@TREE
@STATE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("K", "V", "either"),
    [
        (16, 16, False),
        (16, 16, True),
        (40, 24, False),
        (40, 24, True),
        (128, 128, False),
        pytest.param(128, 128, True, marks=pytest.mark.once),
    ],
)
def test_same_bits_as_stock(
    K: int, V: int, dtype: torch.dtype, either: bool, state_dtype: torch.dtype, tree: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of float32 inputs too: their outputs are not rounded and hide nothing. ``either``: of states that may be turned.

    On a GPU of the heads that GDN models have, read as [V, K]: how a compiler lays out the sums of other tiles, or of
    tiles that may turn, is its own affair.
    """
    module = stock_module()
    if device.type == "cuda" and ((K, V) != (128, 128) or either):
        pytest.skip("no bits are promised on a GPU")
    if device.type == "cpu":
        normalise_as(module, monkeypatch)
    case = make_slots_case(
        batch=3, nodes=5, tree=tree, H=1, HV=2, K=K, V=V, dtype=dtype, state_dtype=state_dtype,
        own_slot=True, orders=[VK] * 3 if either else None, device=device, seed=K,
    )  # fmt: skip
    theirs, states = stock_verify(module, case)
    ours = case.run(implementation("triton"), sglang=stock_version())
    assert_same_bits("o", ours, theirs)
    assert_same_bits("states", case.states_written(), states)


@TREE
@STATE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_has_the_bits_of_the_cpu_engine(dtype: torch.dtype, state_dtype: torch.dtype, tree: bool) -> None:
    from sglang_mamba_mtp.cpu.gdn_ops import fused_sigmoid_gating_delta_rule_update_cpu

    for seed in range(5):
        case = make_slots_case(
            batch=5, nodes=6, tree=tree, H=2, HV=6, K=40, V=24, dtype=dtype, state_dtype=state_dtype, padding=(2,),
            own_slot=True, seed=seed,
        )  # fmt: skip
        live = case.live()
        buffer = torch.full((5, 6, 6, 24, 40), float("nan")).to(state_dtype)
        theirs = fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=case.A_log,
            dt_bias=case.dt_bias,
            q=case.q[None],
            k=case.k[None],
            v=case.v[None],
            a=case.a,
            b=case.b,
            initial_state_source=case.states,
            initial_state_indices=torch.where(case.read_slots > 0, case.read_slots, -1),
            cu_seqlens=torch.arange(6) * 6,
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            cache_steps=6,
            retrieve_parent_token=case.parents,
        )
        assert_same_bits("o", case.run(gdn_verify_slots_reference), theirs.view(case.v.shape))
        assert_same_bits("states", case.states_written(), buffer[live])


def test_rejected_arguments(device: torch.device) -> None:
    """Each refusal names the argument and the value met."""
    op = implementation("triton")
    wrong = {
        "states": lambda x: x.transpose(2, 3),
        "a": lambda x: x[:, :1],
        "A_log": lambda x: x[:1],
        "write_slots": lambda x: x[:1],
        "read_slots": lambda x: x.float(),
        "parents": lambda x: x[:1],
        "axis_order": lambda x: x[1:],
    }
    for name, change in wrong.items():
        case = make_slots_case(K=16, V=8, tree=True, orders=[VK] * 3, device=device)
        setattr(case, name, change(getattr(case, name)))
        with pytest.raises((ValueError, TypeError), match=name):
            case.run(op)


def _turn_bit(case: SlotsCase, slot: int) -> None:
    case.axis_order[slot] = 1 - case.axis_order[slot]


def _roll_parents(case: SlotsCase) -> None:
    case.parents[:, 3] = torch.where(case.parents[:, 3] == 0, 1, 0).to(case.parents.dtype)


SABOTAGE: dict[str, Callable[[SlotsCase], None]] = {
    "wrong parent": _roll_parents,
    "dropped decay": lambda case: setattr(case, "a", torch.full_like(case.a, -100.0)),
    "full strength": lambda case: setattr(case, "b", torch.full_like(case.b, 100.0)),
    "read slots permuted": lambda case: setattr(case, "read_slots", case.read_slots.roll(1)),
    "write slots shifted": lambda case: setattr(case, "write_slots", case.write_slots.roll(1, 1)),
    "scale forgotten": lambda case: setattr(case, "scale", 1.0),
    "swapped axis order": lambda case: setattr(case, "axis_order", 1 - case.axis_order),
    "other order written": lambda case: _turn_bit(case, int(case.write_slots[1, 2])),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_wrong_arguments_are_noticed(name: str) -> None:
    """What damaged arguments give is far from what float64 makes of the right ones, in outputs or in states."""
    case = make_slots_case(batch=3, nodes=5, tree=True, H=1, HV=2, K=16, V=24, orders=[VK, KV, VK], seed=3)
    expected, after = oracle(case)
    right = case.clone()

    def errors(damage: Callable[[SlotsCase], None]) -> float:
        copy = case.clone()
        damage(copy)
        out = copy.run(gdn_verify_slots_reference)
        read_back = replace(right, states=copy.states)  # where the right case looks for them, as it takes them to lie
        return max(rms_ratio(out, expected), rms_ratio(read_back.states_written(), after))

    assert errors(lambda case: None) <= FLOAT32_LIMIT
    assert errors(SABOTAGE[name]) > 1000 * FLOAT32_LIMIT
