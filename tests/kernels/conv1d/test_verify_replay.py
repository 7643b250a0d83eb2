"""conv1d_verify: the convolution of every node along its own path, over pending tokens and the slot's state."""

from __future__ import annotations

import copy

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds, NodeSlots
from mamba_mtp_kernels.common.reference import commit_window_reference
from mamba_mtp_kernels.conv1d import ops_for, verify_replay
from mamba_mtp_kernels.conv1d.fold import commit_conv, fold_conv
from mamba_mtp_kernels.conv1d.reference import commit_conv_reference, conv1d_verify_reference, fold_conv_reference
from mamba_mtp_kernels.conv1d.verify_replay import conv1d_verify

from ..helpers import assert_close, assert_same_bits, chain_parents, planned, random_tree_parents, unfit_plans
from .case import Case

pytestmark = pytest.mark.in_turn

IMPLEMENTATIONS = [pytest.param(conv1d_verify, id="kernel"), pytest.param(conv1d_verify_reference, id="reference")]
FOLDS = {conv1d_verify: (fold_conv, commit_conv), conv1d_verify_reference: (fold_conv_reference, commit_conv_reference)}
LIMIT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 16, 32])
def test_matches_oracle(op, shape, nodes, device):
    generator = torch.Generator().manual_seed(nodes)
    parents = chain_parents(2, nodes) if shape == "chain" else random_tree_parents(2, nodes, generator)
    case = Case(parents, seed=nodes)
    y, inputs = case.run(op, device)
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])
    assert_same_bits("inputs", inputs, case.expected_inputs())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("threshold", [0, 5])
def test_every_pending_count(op, width, threshold, device):
    """From none to as many as a verify may find; what is older than a state's worth is not read."""
    nodes = 3
    pending = list(range(threshold + nodes + 1))
    parents = random_tree_parents(len(pending), nodes, torch.Generator().manual_seed(width))
    case = Case(parents, width=width, pending=pending, threshold=threshold, seed=threshold)
    y, inputs = case.run(op, device)
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])
    assert_same_bits("inputs", inputs, case.expected_inputs())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pending_token_counts_as_a_folded_one(op, dtype, state_dtype, device):
    """The same bits, whatever has been folded: a window's token is rounded as a state would hold it."""
    case = Case(
        random_tree_parents(5, 4, torch.Generator().manual_seed(6)), dim=33, dtype=dtype, state_dtype=state_dtype,
        pending=[0, 1, 2, 3, 7],
    )  # fmt: skip
    waiting = torch.randn(case.inputs.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    case.inputs = torch.where(case.inputs.isnan(), case.inputs, waiting)
    y, _ = case.run(op, device)
    states, slots = case.states.clone().to(device), case.slots.to(device)
    folds = Folds(slots, slots, case.rows.to(device), case.pending[case.slots].to(device))
    FOLDS[op][0](states[None], case.window(device).of_all_layers(), folds)
    case.states, case.pending[case.slots] = states.cpu(), 0
    assert_same_bits("y", case.run(op, device)[0], y)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("bias", [True, False])
def test_widths_and_epilogues(op, width, activation, bias, device):
    parents = random_tree_parents(2, 6, torch.Generator().manual_seed(width))
    case = Case(parents, width=width, bias=bias, strides="transposed" if bias else "pool")
    y, inputs = case.run(op, device, activation=activation)
    assert_close("y", y, case.oracle(activation), LIMIT[torch.float32])
    assert_same_bits("inputs", inputs, case.expected_inputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, state_dtype, device):
    case = Case(
        random_tree_parents(2, 5, torch.Generator().manual_seed(3)), dim=33, dtype=dtype, state_dtype=state_dtype
    )
    y, inputs = case.run(conv1d_verify, device)
    rounded, _ = case.run(conv1d_verify_reference, device)
    assert y.dtype == rounded.dtype == dtype
    assert_close("kernel", y, case.oracle(), LIMIT[dtype])
    assert_close("reference", rounded, case.oracle(), LIMIT[dtype])
    assert_same_bits("inputs", inputs, case.expected_inputs())


def test_float64_reference_is_the_oracle(device):
    case = Case(random_tree_parents(3, 7, torch.Generator().manual_seed(5)), dtype=torch.bfloat16, slots=[2, 0, 1])
    y, _ = case.run(conv1d_verify_reference, device, compute_dtype=torch.float64)
    assert_close("y", y, case.oracle(), 1e-14)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("pending", [0, 1, 2, 5])
def test_tree_that_is_a_chain_has_the_chains_bits(op, pending, device):
    """Branches beside a path must not change the path's outputs."""
    case = Case(torch.tensor([[-1, 0, 0, 1, 3, 1, 4]], dtype=torch.int32), pending=[pending], seed=8)
    tree, _ = case.run(op, device)
    path = [0, 1, 3, 4, 6]
    along, _ = case.over(chain_parents(1, len(path)), path).run(op, device)
    assert_same_bits("y", tree[path], along)


@pytest.mark.in_turn
@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("threshold", "keeps_newest", "pending"),
    [
        (0, False, [4, 1, 3, 2, 2, 1]),
        (4, False, [4, 5, 3, 5, 2, 3]),
        (4, True, [4, 5, 4, 6, 4, 5]),
        (30, False, [4, 5, 8, 10, 12, 13]),
        (30, True, [4, 5, 8, 10, 12, 13]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_in_many_steps_has_the_bits_of_one(op, threshold, keeps_newest, pending, dtype, device):
    """Verify of 13 = verifies of 4, of which 1 to 4 are accepted, with all commits and folds between them: what decode
    without speculation computes. `pending`: after each commit."""
    whole = Case(chain_parents(1, 13), pending=[0], threshold=30, dtype=dtype, seed=11)
    y, _ = whole.run(op, device)
    step = Case(chain_parents(1, 4), pending=[0], threshold=threshold, dtype=dtype, seed=11)
    step.weight, step.bias, step.states[step.slots] = whole.weight, whole.bias, whole.states[whole.slots]
    if keeps_newest:
        step.newest = torch.zeros_like(step.pending)
    done = 0
    for accepted, expected in zip((4, 1, 3, 2, 2, 1), pending, strict=True):
        garbage = torch.full_like(whole.x[:4], float("nan"))
        step.x = torch.cat([whole.x[done : done + accepted], garbage[accepted:]])
        outputs, step.inputs = step.run(op, device)
        assert_same_bits(f"y from {done} on", outputs[:accepted], y[done : done + accepted])
        window, rows = step.window(device), step.batch_rows(device)
        states = step.states[None].to(device)
        FOLDS[op][1](states, window.of_all_layers(), planned(rows, window, 4))
        commit_window_reference(
            window,
            rows,
            window_row=torch.zeros_like(window.pending),
            last_correct=torch.tensor([accepted - 1], device=device),
            steps_to_track=None,
            track_count=torch.zeros(1, dtype=torch.int32, device=device),
            lengths=torch.tensor([done], device=device),
        )
        step.states, step.pending, step.order = states[0].cpu(), window.pending.cpu(), window.order.cpu()
        step.newest = window.newest.cpu() if keeps_newest else None
        done += accepted
        assert int(step.pending[step.slots[0]]) == expected
    assert done == 13


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_one_tree_of_all_rows(op, device):
    case = Case(random_tree_parents(1, 6, torch.Generator().manual_seed(3)).expand(3, 6), pending=[0, 2, 9])
    y, _ = case.run(op, device)
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padding_rows(op, index_dtype, device):
    case = Case(random_tree_parents(4, 3, torch.Generator().manual_seed(1)), slots=[0, 2, -1, 5])
    case.parents[0] = torch.tensor([9, 10**6, -(10**6)])
    case.pending[[0, -1]] = 10**6
    case.slots, case.rows = case.slots.to(index_dtype), case.rows.to(index_dtype)
    y, inputs = case.run(op, device)
    assert (y.reshape(4, 3, -1)[[0, 2]] == 0).all()
    assert_same_bits("inputs", inputs, case.expected_inputs())
    case.parents[0] = chain_parents(1, 3)[0]
    assert_close("y", y, case.oracle(), LIMIT[torch.float32])


def test_many_programs_path(device, monkeypatch):
    """Enough channels that a program handles all nodes of a row."""
    case = Case(random_tree_parents(5, 3, torch.Generator().manual_seed(2)), dim=4, slots=[1, 0, 3, 4, 5])
    spread, _ = case.run(conv1d_verify, device)
    monkeypatch.setattr(verify_replay, "PROGRAMS_WANTED", 0)
    y, inputs = case.run(conv1d_verify, device)
    assert_same_bits("y", y, spread)
    assert_same_bits("inputs", inputs, case.expected_inputs())


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("programs_wanted", "at_once", "most"),
    [(0, -1, 8), (0, 10**9, 4), (10**9, 10**9, 1)],
    ids=["shared by many", "shared by few", "a node each"],
)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6, 8, 11])
@pytest.mark.parametrize(
    ("width", "dtype"), [(4, torch.bfloat16), (4, torch.float32), (3, torch.bfloat16), (2, torch.float16)]
)
def test_chains_have_the_bits_of_trees_that_are_chains(
    programs_wanted, at_once, most, nodes, width, dtype, device, monkeypatch
):
    case = Case(chain_parents(5, nodes), width=width, dtype=dtype, slots=[1, 0, 3, 4, 5], pending=[0, 0, 1, 2, 3])
    monkeypatch.setattr(verify_replay, "PROGRAMS_WANTED", programs_wanted)
    monkeypatch.setattr(verify_replay, "PROGRAMS_AT_ONCE", at_once)
    assert verify_replay.nodes_a_program(5, nodes, case.x.shape[1], chain=True) == min(
        most, 2 ** (nodes - 1).bit_length()
    )
    as_trees, _ = case.run(conv1d_verify, device)
    case.chain, case.parents = True, torch.full_like(case.parents, 10**6)  # nobody asks for links
    y, inputs = case.run(conv1d_verify, device)
    assert_same_bits("y", y, as_trees)
    assert_same_bits("inputs", inputs, case.expected_inputs())


def test_a_chain_over_a_state_of_another_dtype(device):
    case = Case(chain_parents(3, 4), dtype=torch.bfloat16, state_dtype=torch.float32, pending=[0, 1, 5])
    as_trees, _ = case.run(conv1d_verify, device)
    case.chain = True
    assert_same_bits("y", case.run(conv1d_verify, device)[0], as_trees)


@pytest.mark.parametrize(
    "mutate",
    ["parent", "tap order", "shifted state", "another slot", "pending-1", "pending+1", "order", "another row"],
)
def test_mutations_are_seen(mutate, device):
    case = Case(torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32), pending=[2], seed=4)
    expected = case.oracle()
    # a wrong number must show without help from NaN
    generator = torch.Generator().manual_seed(5)
    for name in ("states", "inputs"):
        held = getattr(case, name)
        setattr(case, name, torch.where(held.isnan(), torch.randn(held.shape, generator=generator), held))
    slot, row = int(case.slots[0]), int(case.rows[0])
    assert_close("y", case.run(conv1d_verify, device)[0], expected, LIMIT[torch.float32])
    if mutate == "parent":
        case.parents[0, 4] = 1
    elif mutate == "tap order":
        case.weight = case.weight.flip(1).contiguous()
    elif mutate == "shifted state":
        case.states = case.states.roll(1, 2)
    elif mutate == "another slot":
        case.states = case.states.roll(1, 0)
    elif mutate.startswith("pending"):
        case.pending[slot] += 1 if mutate == "pending+1" else -1
    elif mutate == "order":
        case.order[row, [0, 1]] = case.order[row, [1, 0]]
    else:
        case.rows[0] = 1 - row
    y, _ = case.run(conv1d_verify, device)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("y", y, expected, 1e-2)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_without_a_plan_or_with_too_narrow_a_one(op, device):
    case = Case(chain_parents(1, 3))
    for rows, message in unfit_plans(planned(case.batch_rows(device), case.window(device), 3), 3, case.threshold):
        with pytest.raises(ValueError, match=message):
            case.run(lambda *given, r=rows, **named: op(*given, **(named | {"rows": r})), device)


def test_errors_name_the_argument(device):
    case = Case(chain_parents(1, 3))
    with pytest.raises(ValueError, match="activation: 'gelu'"):
        case.run(conv1d_verify, device, activation="gelu")
    narrow = copy.copy(case)
    narrow.weight = case.weight[:, :3].contiguous()
    with pytest.raises(ValueError, match="conv_states: shape"):
        narrow.run(conv1d_verify, device)
    case.inputs = case.inputs[:, :, :9].contiguous()
    with pytest.raises(ValueError, match=r"window_inputs: shape .*, expected \[R=2, C=9, dim=10\]"):
        case.run(conv1d_verify, device)
    case = Case(chain_parents(1, 3))
    case.threshold = 4
    with pytest.raises(ValueError, match=r"order: capacity 9, expected at least 4 \+ 2 \* 3"):
        case.run(conv1d_verify, device)


def test_ops_for():
    assert ops_for("cpu").conv1d_verify.func is conv1d_verify_reference
    assert ops_for("cuda").conv1d_verify is conv1d_verify


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_engine_convolves_alike_in_every_mode(dtype):
    """Replay's op for a CPU and slots mode's, which has the bits of the CPU engine's own convolution."""
    case = Case(chain_parents(3, 5), dim=40, dtype=dtype, state_dtype=dtype, pending=[0, 2, 6])
    ops = ops_for("cpu")
    ours, _ = case.run(ops.conv1d_verify, torch.device("cpu"))
    states = case.states.clone()
    window = case.window("cpu").of_all_layers()
    ops.fold_conv(states[None], window, Folds(case.slots, case.slots, case.rows, case.pending[case.slots]))
    theirs = ops.conv1d_verify_slots(
        case.x,
        conv_states=states,
        weight=case.weight,
        bias=case.bias,
        activation="silu",
        nodes=NodeSlots(case.slots, torch.zeros(3, 5, dtype=torch.int32)),
    )
    # products rounded to bf16 would be off by 2e-3
    assert_close("y", ours, theirs, 1e-6 if dtype == torch.float32 else 2e-4)
