"""mamba2_verify against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mamba_mtp_kernels.mamba2 import ops_for
from mamba_mtp_kernels.mamba2.fold import mamba2_fold
from mamba_mtp_kernels.mamba2.reference import mamba2_fold_reference, mamba2_verify_reference
from mamba_mtp_kernels.mamba2.verify_replay import Tiling, mamba2_verify
from mamba_mtp_kernels.mamba2.window import Mamba2Window

from ..helpers import ancestors_of, assert_close, assert_same_bits, path_to, planned, unfit_plans
from .case import WINDOWS, Case, make_case

IMPLEMENTATIONS = [pytest.param(mamba2_verify, id="kernel"), pytest.param(mamba2_verify_reference, id="reference")]
# (a few small rows have a kernel of their own, but for more than 8 nodes; two blocks a program stream)
stream = partial(mamba2_verify, tiling=Tiling(16, 2, 1, 2))
WITH_STREAM = [*IMPLEMENTATIONS, pytest.param(stream, id="stream")]
FOLDS = {mamba2_verify: mamba2_fold, mamba2_verify_reference: mamba2_fold_reference, stream: mamba2_fold}
# float32 sums of a few dozen terms; stock's own error on these cases is 1e-7 .. 2e-7
FLOAT32_LIMIT = 6e-7
OUTPUT_LIMIT = {torch.float32: FLOAT32_LIMIT, torch.float16: 1e-3, torch.bfloat16: 6e-3}
STATE_LIMIT = {torch.float32: FLOAT32_LIMIT, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(
    case: Case, op=mamba2_verify, *, out_dtype=torch.float32, limit: float | None = None, **extra
) -> torch.Tensor:
    """Run `op` on a copy and compare outputs, checkpoints and windows with the oracle; returns y.

    Outputs are taken in float32 (`out`), so that the comparison is not one of output roundings.
    """
    before, (expected, after) = case.clone(), case.clone().oracle()
    state_dtype = case.tensors["checkpoint"].dtype
    if limit is None:
        limit = FLOAT32_LIMIT
        if state_dtype != torch.float32 and bool((case.books.pending[case.books.slots.clamp(min=0).long()] > 0).any()):
            limit = STATE_LIMIT[state_dtype]  # a fold's rounding differs where two results straddle a midpoint
    x = case.tensors["x"]
    out = torch.full(x.shape, float("nan"), dtype=out_dtype, device=x.device)
    assert case.run(op, out=out, **extra) is out
    case.check_untouched(before)
    live = (case.books.slots > 0).repeat_interleave(case.books.nodes)
    assert_close("y", out[live], expected[live], max(limit, OUTPUT_LIMIT[out_dtype]))
    assert (out[~live] == 0).all(), "padding rows must be zero"
    if live.any():
        for name, values in case.appended().items():
            if name == "window_dt":
                assert_close(name, values, after.appended()[name], 3e-7)
            else:
                assert_same_bits(name, values, after.appended()[name].to(values.dtype))
    folded = [int(case.books.slots[b]) for b in range(case.books.batch) if case.books.folding(b) > 0]
    if folded:
        actual, wanted = case.tensors["checkpoint"][folded], after.tensors["checkpoint"][folded]
        assert_close("checkpoint", actual, wanted, STATE_LIMIT[state_dtype])
    return out


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 13, 16, 32])
def test_nodes(op, tree, nodes, device):
    """One row without pending tokens, one with, one that folds."""
    threshold = 3
    case = make_case(
        nodes=nodes,
        tree=tree,
        nheads=2,
        ngroups=1,
        fold_threshold=threshold,
        pending=[0, threshold, threshold + nodes],
        device=device,
        seed=nodes,
    )
    check(case, op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("threshold", [0, 1, 7, 16, 20])
def test_pending_counts(op, threshold, device):
    pending = sorted({0, 1, threshold // 2, threshold, threshold + 1, threshold + 2})
    pending = [count for count in pending if count <= threshold + 2]
    case = make_case(
        batch=len(pending),
        nodes=2,
        nheads=1,
        ngroups=1,
        fold_threshold=threshold,
        pending=pending,
        device=device,
        seed=3,
    )
    check(case, op)


#: (nodes, fold_threshold, pending, newest): as many pending tokens as fit beside the nodes in a tile of 32, fewer, and
#: more, before a fold and after it.
AROUND_A_TILE = [
    (16, 20, [0, 16, 17, 18, 20, 25, 36, 36], [0, 0, 3, 0, 9, 9, 18, 4]),
    (12, 32, [20, 21, 32, 40, 44], [1, 0, 32, 30, 2]),
]


def case_around_a_tile(nodes, threshold, pending, newest, **given):
    """Trees over strided pools; padding last."""
    return make_case(
        batch=len(pending) + 1,
        nodes=nodes,
        tree=True,
        fold_threshold=threshold,
        pending=[*pending, 0],
        newest=[*newest, 0],
        padding=(len(pending),),
        strided=True,
        **given,
    )


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", AROUND_A_TILE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dstate", [16, 32])
def test_more_than_a_tile_of_tokens(op, window, dtype, dstate, device):
    sizes = {"nheads": 2, "ngroups": 1, "dstate": dstate}
    check(case_around_a_tile(*window, **sizes, dtype=dtype, state_dtype=dtype, device=device, seed=5), op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("threshold", [0, 1, 4, 16])
def test_every_newest_count(op, threshold, device):
    """Against float64, and against float64 that folds nothing: what has been folded is no matter to the outputs."""
    counts = sorted({0, 1, threshold // 2, threshold, threshold + 1, threshold + 2})
    pairs = [(p, n) for p in counts for n in range(min(p, threshold) + 1) if threshold < 9 or n % 5 == 1 or n == 16]
    case = make_case(
        batch=len(pairs) + 1,
        nodes=2,
        tree=True,
        nheads=1,
        ngroups=1,
        fold_threshold=threshold,
        pending=[*(p for p, _ in pairs), 0],
        newest=[*(n for _, n in pairs), 0],
        padding=(len(pairs),),
        strided=True,
        device=device,
        seed=3,
    )
    lazy = case.clone()
    lazy.books.fold_threshold, lazy.books.newest, lazy.books.length = threshold + 2, None, None
    for held in (vars(lazy.books), lazy.tensors):  # a longer window, of which nothing more is used
        for name in ("order", *WINDOWS):
            if name in held:
                held[name] = torch.cat([held[name], held[name][:, :2]], 1)
    y = check(case, op)
    assert_close("y", y, lazy.oracle()[0], FLOAT32_LIMIT)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_new_is_a_window_that_does_not_ask(op, dtype, device):
    """newest of 0 everywhere: the bits of newest None."""
    case = make_case(pending=[3, 7, 10], newest=[0, 0, 0], dtype=dtype, state_dtype=dtype, device=device)
    plain = case.clone()
    plain.books.newest = plain.books.length = None
    assert_same_bits("y", case.run(op), plain.run(op))
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, case.tensors[name], plain.tensors[name])


@pytest.mark.parametrize("op", WITH_STREAM)
@pytest.mark.parametrize("newest", [None, [3, 0, 6]], ids=["takes all", "leaves the newest"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_verify_that_folds_equals_fold_then_verify(op, newest, state_dtype, device):
    """A folded state has the bits of mamba2_fold of as many tokens, and outputs start from it; what the fold leaves
    pending is replayed as ever."""
    case = make_case(pending=[7, 10, 9], newest=newest, state_dtype=state_dtype, device=device)
    folded, slots = case.clone(), case.books.slots.long()
    books = folded.books
    books.newest = books.length = None
    counts = [pending - stays for pending, stays in zip((7, 10, 9), newest or (0, 0, 0), strict=True)]
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    folded.fold(FOLDS[op], replace(books.settling(), counts=on_device))
    for b, count in enumerate(counts):
        row = int(books.rows[b])
        books.order[row] = books.order[row].roll(-count)
    books.pending[slots] -= on_device
    ours, theirs = case.run(op), folded.run(op)
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, case.tensors[name], folded.tensors[name])
    assert_same_bits("y", ours, theirs)


@pytest.mark.parametrize("mutate", ["newest forgotten", "folded one token too far", "folded one token too few"])
def test_wrong_folds_are_seen(mutate, device):
    """Outputs are the same whatever is folded: it is the state that must show it."""
    case = make_case(nodes=5, tree=True, pending=[3, 8, 9], newest=[2, 3, 1], device=device, seed=3)
    check(case.clone())

    def verify(*inputs, rows, **arguments):
        newest = case.books.newest
        change = {"newest forgotten": -newest, "folded one token too far": -1}.get(mutate, 1)
        wrong = planned(case.books.batch_rows, replace(case.window(), newest=newest + change), 5)
        return mamba2_verify(*inputs, rows=wrong, **arguments)

    with pytest.raises(AssertionError, match="checkpoint: RMS error ratio"):
        check(case, verify)


@pytest.mark.parametrize(
    ("nheads", "headdim", "ngroups", "dstate"),
    [(2, 5, 1, 16), (3, 20, 3, 24), (4, 33, 2, 40), (2, 64, 1, 16), (1, 80, 1, 16), (6, 8, 2, 130)],
)
def test_head_sizes(nheads, headdim, ngroups, dstate, device):
    case = make_case(
        batch=2,
        nodes=3,
        tree=True,
        nheads=nheads,
        headdim=headdim,
        ngroups=ngroups,
        dstate=dstate,
        pending=[2, 8],
        device=device,
        seed=headdim,
    )
    check(case)


@pytest.mark.parametrize("tiling", [Tiling(16, 1, 2, 1), Tiling(16, 3, 1, 3), Tiling(32, 2, 4, 2), Tiling(64, 1, 4, 1)])
def test_tilings(tiling, device):
    """One head's rows over one or several programs; a program's last block may lie beyond headdim."""
    case = make_case(batch=2, nodes=3, nheads=2, headdim=40, ngroups=1, pending=[5, 9], device=device)
    check(case, tiling=tiling)


@pytest.mark.parametrize("op", WITH_STREAM)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(op, dtype, state_dtype, device):
    case = make_case(
        nodes=3, tree=True, nheads=2, pending=[0, 6, 9], dtype=dtype, state_dtype=state_dtype, device=device
    )
    check(case, op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_in_model_dtype(op, dtype, device):
    case = make_case(nodes=3, pending=[0, 6, 9], dtype=dtype, device=device)
    expected, _ = case.clone().oracle()
    y = case.run(op)
    assert y.dtype == dtype and y.is_contiguous()
    assert_close("y", y, expected, OUTPUT_LIMIT[dtype])


@pytest.mark.parametrize("op", WITH_STREAM)
def test_sglang_views_strides_and_int64(op, device):
    plain = make_case(tree=True, pending=[3, 6, 10], device=device, seed=5)
    y = check(plain.clone(), op)
    as_sglang = make_case(
        tree=True, pending=[3, 6, 10], expanded=True, strided=True, index_dtype=torch.int64, device=device, seed=5
    )
    assert_same_bits("y", check(as_sglang, op), y)


@pytest.mark.parametrize("op", WITH_STREAM)
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("parts", ["all", "none"])
def test_optional_parts(op, softplus, parts, device):
    case = make_case(nodes=3, pending=[0, 5, 8], nheads=2, device=device)
    case.dt_softplus = softplus
    if parts == "none":
        case.tensors["D"] = case.tensors["dt_bias"] = None
    if not softplus:
        case.tensors["dt"] = case.tensors["dt"].abs()  # negative steps would grow without bound
        if case.tensors["dt_bias"] is not None:
            case.tensors["dt_bias"] = case.tensors["dt_bias"].abs()
    check(case, op)


def test_large_dt_takes_the_linear_branch(device):
    case = make_case(nodes=2, pending=[0, 1, 2], decay=0.01, device=device)
    case.tensors["dt"][0] += 30
    check(case)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay", [0.0, 1e-3, 20.0, 1000.0])
def test_decays(op, decay, device):
    check(make_case(nodes=5, tree=True, pending=[2, 6, 11], decay=decay, device=device), op)


def test_strong_decay_upstream_costs_no_digits(device):
    """A reset early in the window, mild decays after it: differences of cumulated decays would lose 1e-5 here."""
    case = make_case(batch=2, nodes=6, nheads=2, ngroups=1, pending=[6, 5], decay=0.0, device=device)
    case.tensors["A"] -= 1.0
    case.tensors["dt_bias"] = None
    case.tensors["dt"] *= 0.1
    case.tensors["window_dt"] *= 0.05
    books = case.books
    for b in range(2):
        case.tensors["window_dt"][int(books.rows[b]), int(books.order[books.rows[b].long(), 0])] = 3000.0
    case.tensors["dt"][0] = 2000.0
    check(case)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("padding", [(0,), (1, 2), (0, 1, 2, 3)])
def test_padding_rows(op, padding, device):
    case = make_case(batch=4, nodes=3, pending=[2, 6, 9, 0], nheads=2, padding=padding, device=device)
    for b in padding:
        case.books.ancestors[b] = -1  # stale masks
        case.tensors["x"][b * 3 : b * 3 + 3] = float("nan")
    check(case, op)


def test_masks_beyond_the_batch_are_not_read(device):
    case = make_case(batch=2, nodes=3, pending=[1, 7], nheads=1, ngroups=1, device=device)
    case.books.ancestors = torch.cat([case.books.ancestors, torch.full_like(case.books.ancestors, -1)])
    check(case)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_one_tree_of_all_rows(op, device):
    case = make_case(batch=3, nodes=6, pending=[0, 3, 9], nheads=2, device=device)
    for name in ("parents", "ancestors"):
        setattr(case.books, name, getattr(case.books, name)[2:].repeat(3, 1))
    case.books.one_tree = True
    check(case, op)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_tree_that_is_a_chain(op, device):
    """Nodes of one path through a tree have the outputs of the chain of these nodes."""
    case = make_case(batch=1, nodes=7, pending=[4], device=device, seed=2)
    case.books.parents[0] = torch.tensor([-1, 0, 0, 1, 3, 1, 4])
    case.books.ancestors[:] = ancestors_of(case.books.parents.cpu()).to(device)
    path = path_to(case.books.parents[0].tolist(), 6)
    chain = make_case(batch=1, nodes=len(path), pending=[4], fold_threshold=6, device=device, seed=2)
    chain.books.slots, chain.books.rows = case.books.slots, case.books.rows
    chain.books.pending, chain.books.order = case.books.pending, case.books.order
    for name, x in case.tensors.items():
        chain.tensors[name] = x[path] if name in ("x", "dt", "B", "C") else x
    chain.books.fold_threshold = case.books.fold_threshold
    along = chain.clone().run(op)
    assert_close("y", case.run(op)[path], along, 3e-7)


def test_a_rejected_suffix_does_not_matter(device):
    """Nodes off the path, and whatever a later step finds in their window entries, change nothing."""
    case = make_case(batch=1, nodes=6, pending=[3], device=device)
    corrupted = case.clone()
    for name in ("x", "dt", "B", "C"):
        corrupted.tensors[name][3:] = 1e4
    y, other = case.run(mamba2_verify), corrupted.run(mamba2_verify)
    assert_same_bits("y", other[:3], y[:3])


def test_window_order_is_only_an_address(device):
    """The same tokens at other positions give the same bits."""
    case = make_case(batch=2, nodes=3, pending=[5, 9], nheads=2, device=device, seed=6)
    moved = case.clone()
    generator = torch.Generator().manual_seed(1)
    rows, capacity = case.books.order.shape
    for row in range(rows):
        shuffle = torch.randperm(capacity, generator=generator).to(device)
        moved.books.order[row] = shuffle[case.books.order[row].long()].int()
        for name in ("window_x", "window_B", "window_dt"):
            moved.tensors[name][row, shuffle] = case.tensors[name][row].clone()
    assert_same_bits("y", moved.run(mamba2_verify), case.run(mamba2_verify))
    assert_same_bits("checkpoint", moved.tensors["checkpoint"], case.tensors["checkpoint"])


@pytest.mark.parametrize("op", WITH_STREAM)
def test_schedule_changes_no_bits(op, device):
    case = make_case(batch=4, nodes=3, pending=[2, 8, 9, 0], padding=(3,), nheads=2, device=device)
    plain, ordered = case.clone(), case.clone()
    schedule = torch.tensor([2, 1, 3, 0, 77], dtype=torch.int32, device=device)
    assert_same_bits("y", ordered.run(op, schedule=schedule), plain.run(op))
    for name in ("checkpoint", "window_x", "window_B", "window_dt"):
        assert_same_bits(name, ordered.tensors[name], plain.tensors[name])


@pytest.mark.parametrize(
    "mutate", ["parent", "dropped decay", "stale pending", "swapped order", "accept+1", "head", "D"]
)
def test_mutations_are_seen(mutate, device):
    case = make_case(batch=1, nodes=4, tree=True, pending=[4], device=device, seed=9)
    expected, _ = case.clone().oracle()
    books = case.books
    slot, row = int(books.slots[0]), int(books.rows[0])
    if mutate == "parent":
        books.parents[0, 3] = (int(books.parents[0, 3]) + 1) % 3
        books.ancestors[:] = ancestors_of(books.parents.cpu()).to(device)
    elif mutate == "dropped decay":
        case.tensors["A"] = torch.zeros_like(case.tensors["A"])
    elif mutate == "stale pending":
        books.pending[slot] = 3
    elif mutate == "swapped order":
        books.order[row, :2] = books.order[row, :2].flip(0)
    elif mutate == "accept+1":
        books.pending[slot] = 5
        for name in ("window_x", "window_B", "window_dt"):
            case.tensors[name].nan_to_num_(0.5)
    elif mutate == "head":
        case.tensors["A"] = case.tensors["A"].roll(1)
    else:
        case.tensors["D"] = case.tensors["D"] + 0.01
    y = case.run(mamba2_verify)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("y", y, expected, 1e-4)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_without_a_plan_or_with_too_narrow_a_one(op, device):
    case = make_case(device=device)
    rows = planned(case.books.batch_rows, case.window(), case.books.nodes)
    for unfit, message in unfit_plans(rows, case.books.nodes, case.books.fold_threshold):
        with pytest.raises(ValueError, match=message):
            case.verify(lambda *given, r=unfit, **named: op(*given, **(named | {"rows": r})))


def test_errors_name_the_argument(device):
    case = make_case(device=device)
    with pytest.raises(ValueError, match=r"A: shape .* one value a head"):
        bad = case.clone()
        bad.tensors["A"] = torch.ones(4, 12, 16, device=device)
        bad.verify(mamba2_verify)
    with pytest.raises(ValueError, match=r"order: capacity 14, expected at least 7 \+ 2 \* 4"):
        bad = case.clone()
        bad.books.fold_threshold = 7
        bad.verify(mamba2_verify)
    with pytest.raises(TypeError, match=r"window_B: dtype torch\.float16"):
        bad = case.clone()
        bad.tensors["window_B"] = bad.tensors["window_B"].half()
        bad.verify(mamba2_verify)
    with pytest.raises(ValueError, match="window_dt: shape"):
        bad = case.clone()
        bad.tensors["window_dt"] = bad.tensors["window_dt"][:, 1:]
        bad.verify(mamba2_verify)
    for op in (mamba2_verify, mamba2_verify_reference):
        with pytest.raises(ValueError, match="65 nodes, the ancestor mask holds 64"):
            bad = case.clone()
            bad.books.ancestors = torch.zeros(3, 65, dtype=torch.int64, device=device)
            bad.books.parents = bad.books.ancestors.int()
            for name in ("x", "dt", "B", "C"):
                bad.tensors[name] = bad.tensors[name][:1].expand(3 * 65, *bad.tensors[name].shape[1:])
            bad.verify(op)


@pytest.mark.parametrize("name", ["x", "B", "dt"])
def test_offsets_within_a_row_fit_into_32_bits(name):
    window = make_case().window()
    inputs = {each: getattr(window, each) for each in window.input_names()}

    def check_reach(stride: int) -> None:
        """Of a window whose tokens of one input lie so far apart (without memory: it would take too much)."""
        wide = torch.empty_strided(inputs[name].shape, (0, stride, *inputs[name].stride()[2:]), device="meta")
        Mamba2Window.check_reach(SimpleNamespace(input_names=window.input_names, **{**inputs, name: wide}))

    furthest = 2**31 // window.order.shape[1]
    check_reach(furthest)
    with pytest.raises(ValueError, match=rf"window_{name}: 21474836\d\d elements from a row's first to its last"):
        check_reach(furthest + 1)


def test_ops_for():
    assert ops_for("cpu").mamba2_verify is mamba2_verify_reference
    verify = ops_for("cuda").mamba2_verify
    assert verify.func is mamba2_verify and verify.keywords == {"after_convolution": True}


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [6, 24])
@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize(
    ("nheads", "headdim", "ngroups", "dstate"), [(128, 80, 8, 128), (64, 64, 8, 128), (48, 64, 1, 256)]
)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_model_shapes(nodes, nheads, headdim, ngroups, dstate, state_dtype, batch, device):
    case = make_case(
        batch=batch,
        nodes=nodes,
        tree=True,
        nheads=nheads,
        headdim=headdim,
        ngroups=ngroups,
        dstate=dstate,
        fold_threshold=16,
        pending=[0, 3, 16, 17, 16 + nodes, 9] * (batch // 6),
        padding=(5,),
        dtype=torch.bfloat16,
        state_dtype=state_dtype,
        strided=True,
        device=device,
    )
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dstate", [128, 256])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_more_than_a_tile_of_tokens_at_model_heads(state_dtype, dstate, device):
    sizes = {"nheads": 64, "headdim": 80, "ngroups": 8, "dstate": dstate}
    check(case_around_a_tile(*AROUND_A_TILE[0], **sizes, dtype=torch.bfloat16, state_dtype=state_dtype, device=device))


@pytest.mark.gpu
def test_graph_replay_equals_eager(device):
    case = make_case(batch=4, nodes=4, nheads=16, headdim=64, dstate=64, pending=[0, 6, 9, 3], device=device)
    eager, captured = case.clone(), case.clone()
    expected = eager.run(mamba2_verify)
    captured.run(mamba2_verify)  # compile
    for name in ("checkpoint", "window_x", "window_B", "window_dt"):
        captured.tensors[name].copy_(case.tensors[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = captured.verify(mamba2_verify)
    for name in ("checkpoint", "window_x", "window_B", "window_dt"):
        captured.tensors[name].copy_(case.tensors[name])
    captured.put_nodes()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits("y", y, expected)
    assert_same_bits("checkpoint", captured.tensors["checkpoint"], eager.tensors["checkpoint"])
