"""fold_conv and commit_conv: a slot's state after the first tokens of a window, all layers at once. Copies, so compared
bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from mamba_mtp_kernels.common.operands import Folds, Rows
from mamba_mtp_kernels.conv1d import fold, ops_for
from mamba_mtp_kernels.conv1d.fold import commit_conv, fold_conv
from mamba_mtp_kernels.conv1d.reference import commit_conv_reference, fold_conv_reference
from mamba_mtp_kernels.conv1d.window import ConvWindow

from ..helpers import assert_same_bits, plan_alone, planned


@triton.jit
def _note_the_last_kernel(found, columns):
    at = tl.program_id(0) * columns + tl.program_id(1)
    tl.store(found + at, fold.is_last_program().to(tl.int32))


FOLDS = [pytest.param(fold_conv, id="kernel"), pytest.param(fold_conv_reference, id="reference")]
COMMITS = [pytest.param(commit_conv, id="kernel"), pytest.param(commit_conv_reference, id="reference")]
INDEX_DTYPES = pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
THRESHOLD = 3


class Case:
    """Batch row b folds the first counts[b] tokens; whatever no fold may read is NaN, unless `poison` says no."""

    def __init__(
        self,
        counts,
        *,
        width=4,
        layers=2,
        dim=6,
        dtype=torch.float32,
        state_dtype=None,
        pending=None,
        newest=None,
        poison=True,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        batch, capacity, taps = len(counts), max([*counts, *(pending or [])]) + 2, width - 1
        slots, rows = 2 * batch + 3, batch + 2
        self.counts = torch.tensor(counts)
        self.states = torch.randn(layers, slots, dim, taps, generator=generator).to(state_dtype or dtype)
        self.inputs = torch.randn(layers, rows, capacity, dim, generator=generator).to(dtype)
        self.order = torch.stack([torch.randperm(capacity, generator=generator) for _ in range(rows)]).int()
        shuffled = 1 + torch.randperm(slots - 1, generator=generator)
        self.src, self.elsewhere = shuffled[:batch].clone(), shuffled[batch : 2 * batch].clone()
        self.dst = self.src.clone()
        self.rows = torch.randperm(rows, generator=generator)[:batch]
        self.pending = self._by_slot(pending, slots)
        self.newest = None if newest is None else self._by_slot(newest, slots)
        if poison:
            read = torch.zeros(rows, capacity, dtype=torch.bool)
            for b, count in enumerate(counts):
                read[self.rows[b], self.order[self.rows[b], max(count - taps, 0) : count].long()] = True
                self.states[:, self.src[b], :, : min(count, taps)] = float("nan")
            self.inputs[:, ~read] = float("nan")

    def _by_slot(self, counts, slots):
        """counts at the sources; garbage at all other slots."""
        held = torch.full((slots,), 10**6, dtype=torch.int32)
        if counts is not None:
            held[self.src] = torch.tensor(counts, dtype=torch.int32)
        return held

    def window(self, device):
        return ConvWindow(
            self.pending.to(device),
            self.order.to(device),
            THRESHOLD,
            self.inputs.clone().to(device),
            newest=None if self.newest is None else self.newest.to(device),
            length=None if self.newest is None else self.newest.to(device),
        )

    def fold(self, op, device, index_dtype=torch.int64):
        where = (self.src, self.dst, self.rows, self.counts)
        return self._run(op, device, Folds(*(index.to(device, index_dtype) for index in where)))

    def commit(self, op, device, index_dtype=torch.int64):
        rows = Rows(self.src.to(device, index_dtype), self.rows.to(device, index_dtype))
        return self._run(op, device, plan_alone(planned(rows, self.window(device), 1)))

    def _run(self, op, device, where):
        states, window = self.states.clone().to(device), self.window(device)
        op(states, window, where)
        assert_same_bits("inputs", window.inputs, self.inputs)
        assert_same_bits("order", window.order, self.order)
        assert_same_bits("pending", window.pending, self.pending)
        return states.cpu()

    def expected(self):
        """The K-1 newest of the old state and the first tokens, one slot after the other."""
        states = self.states.clone()
        for b, count in enumerate(self.counts.tolist()):
            src, dst = int(self.src[b]), int(self.dst[b])
            if src <= 0 or dst <= 0:
                continue
            history = self.states[:, src]
            if count:
                tokens = self.inputs[:, self.rows[b], self.order[self.rows[b], :count].long()]
                history = torch.cat([history, tokens.transpose(1, 2).to(states.dtype)], dim=2)
            states[:, dst] = history[:, :, history.shape[2] - states.shape[3] :]
        return states


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("where", ["in place", "elsewhere", "mixed"])
@INDEX_DTYPES
def test_fold_matches_the_rule(op, width, where, index_dtype, device):
    """Counts from none to more than a state holds; a plain copy may have any row, and padding anything."""
    case = Case([0, 1, 2, 3, 4, 7, 2, 5, 0], width=width, seed=width)
    if where != "in place":
        moved = slice(None) if where == "elsewhere" else slice(None, None, 2)
        case.dst[moved] = case.elsewhere[moved]
        case.rows[0] = 10**6
    case.src[6], case.rows[6] = -1, 10**6
    case.dst[7], case.rows[7] = 0, -(10**6)
    assert_same_bits("conv_states", case.fold(op, device, index_dtype), case.expected())


def counts_of(pending, newest):
    """How many tokens a verify folds of each row, from the design's sentence."""
    return [p - stay if p > THRESHOLD else 0 for p, stay in zip(pending, newest or [0] * len(pending), strict=True)]


@pytest.mark.parametrize("op", COMMITS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("newest", [None, [0, 2, 3, 1, 3, 2, 0, 1]], ids=["takes all", "leaves the newest"])
@INDEX_DTYPES
def test_commit_folds_what_the_verify_folded(op, width, newest, index_dtype, device):
    pending = [0, 2, 3, 4, 4, 7, 8, 5]
    case = Case(counts_of(pending, newest), width=width, pending=pending, newest=newest, seed=width)
    case.src[7], case.dst[7], case.rows[7] = 0, 0, 10**6
    assert_same_bits("conv_states", case.commit(op, device, index_dtype), case.expected())


@pytest.mark.parametrize("op", COMMITS)
def test_only_padding(op, device):
    case = Case([2, 5], pending=[2, 5])
    case.src[:], case.dst[:], case.rows[:] = torch.tensor([0, -1]), 0, -(10**6)
    assert_same_bits("conv_states", case.commit(op, device), case.states)


# the interpreter truncates to bf16 where hardware rounds: no float32 to bf16 here, but see test_verify_replay.py
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["pool", "transposed"])
def test_pools_and_dtypes(op, dtype, state_dtype, transposed, device):
    case = Case([0, 2, 5, 1], dtype=dtype, state_dtype=state_dtype, seed=2)
    case.dst[1:3] = case.elsewhere[1:3]
    expected = case.expected()
    if transposed:
        case.states = case.states.transpose(2, 3).contiguous().transpose(2, 3)
    assert_same_bits("conv_states", case.fold(op, device).contiguous(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [4, 12, 600])
@INDEX_DTYPES
def test_in_words_of_four_channels(dtype, dim, index_dtype, device):
    """As SGLang's pools have them: entries of every age come from where the rule says."""
    pending, newest = [0, 1, 2, 3, 4, 7, 2, 5, 0, 4], [0, 0, 0, 0, 1, 2, 0, 0, 0, 3]
    case = Case(pending, dtype=dtype, dim=dim, seed=dim)
    case.dst[1::2] = case.elsewhere[1::2]
    case.src[6], case.dst[7] = -1, 0
    assert fold._in_words(case.states, case.inputs)
    assert_same_bits("folded", case.fold(fold_conv, device, index_dtype), case.expected())
    case = Case(counts_of(pending, newest), dtype=dtype, dim=dim, pending=pending, newest=newest, seed=dim)
    case.src[7], case.dst[7], case.rows[7] = 0, 0, 10**6
    assert fold._in_words(case.states, case.inputs)
    assert_same_bits("committed", case.commit(commit_conv, device, index_dtype), case.expected())


def test_what_does_not_lie_in_words(device):
    case = Case([4, 2], dtype=torch.bfloat16, dim=8)
    states, inputs = case.states, case.inputs
    assert fold._in_words(states, inputs) and fold._in_words(states[1:, 2:], inputs[:, 1:, 1:])
    padded = torch.zeros(*states.shape[:3], 4, dtype=states.dtype)
    others = {
        "a convolution of three taps": states[..., :2].contiguous(),
        "gaps between channels": padded[..., :3],
        "entries apart": states.transpose(2, 3).contiguous().transpose(2, 3),
        "float32": states.float(),
        "another type of 16 bits": states.half(),
        "channels that do not fill words": states[:, :, :6].contiguous(),
        "slots between words": states.flatten(1)[:, 2:50].unflatten(1, (2, 8, 3)),
    }
    for name, other in others.items():
        assert not fold._in_words(other, inputs), name
    # at an address that would do, and with strides that would not: of layers, of slots or rows, of tokens
    sizes = {"states": (*states.shape[:2], 8, 3), "inputs": (*inputs.shape[:3], 8)}
    memory = torch.zeros(10**5, dtype=states.dtype)
    for name, axes in (("states", 2), ("inputs", 3)):
        for axis in range(axes):
            strides = list(torch.empty(sizes[name], device="meta").stride())
            strides[axis] += 2
            apart = {"states": states, "inputs": inputs, name: memory.as_strided(sizes[name], strides)}
            assert not fold._in_words(apart["states"], apart["inputs"]), (name, axis)


@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_one_program_is_the_last(grid, device):
    """The one that waits for what runs beside it."""

    found = torch.zeros(grid, dtype=torch.int32, device=device)
    _note_the_last_kernel[grid](found, grid[1])
    assert int(found.sum()) == int(found[-1, -1]) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_who_runs_beside_what(overlap, monkeypatch):
    """The convolution's half of a commit that follows the window's, where a GPU can do so: nobody else."""
    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *_, **options: launches.append(options)

    monkeypatch.setattr(fold, "_fold_conv_kernel", Recorder())
    monkeypatch.setattr(fold, "has_dependent_launch", lambda _: overlap)
    case = Case([4, 2], pending=[4, 2])
    window, folds = case.window("cpu"), Folds(case.src, case.dst, case.rows, case.counts)
    rows = planned(Rows(case.src, case.rows), window, 1)
    fold_conv(case.states, window, folds)
    commit_conv(case.states, window, rows)
    commit_conv(case.states, window, rows, after_commit=True)
    assert [options["BESIDE"] for options in launches] == [False, False, overlap]
    assert all(options["OVERLAP"] == options["launch_pdl"] == overlap for options in launches)


@pytest.mark.parametrize("fold, commit", [(fold_conv, commit_conv), (fold_conv_reference, commit_conv_reference)])
@pytest.mark.parametrize("dim", [255, 300])
def test_many_channels(fold, commit, dim, device):
    """More than a program has; the last of them beyond the pool's."""
    case = Case([1, 4], dim=dim, layers=3, pending=[2, 5], newest=[1, 1])
    assert_same_bits("folded", case.fold(fold, device), case.expected())
    case = Case([0, 4], dim=dim, layers=3, pending=[2, 5], newest=[1, 1])
    assert_same_bits("committed", case.commit(commit, device), case.expected())


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("first", [0, 1, 2, 4, 6])
def test_a_fold_in_two_halves_is_the_fold(op, first, device):
    case = Case([6], seed=7, poison=False)
    whole, order = case.fold(op, device), case.order.clone()
    case.counts[0] = first
    case.states = case.fold(op, device)
    case.order, case.counts[0] = order.roll(-first, 1), 6 - first
    assert_same_bits("conv_states", case.fold(op, device), whole)


@pytest.mark.parametrize("mutate", ["count+1", "count-1", "row", "order", "source", "destination", "dropped"])
def test_mutations_are_seen(mutate, device):
    case = Case([4, 2], seed=4, poison=False)
    case.dst[1] = case.elsewhere[1]
    expected = case.expected()
    assert_same_bits("conv_states", case.fold(fold_conv, device), expected)
    if mutate.startswith("count"):
        case.counts[1] += 1 if mutate == "count+1" else -1
    elif mutate == "row":
        case.rows = case.rows.flip(0)
    elif mutate == "order":
        case.order[:, [1, 2]] = case.order[:, [2, 1]]
    elif mutate == "source":
        case.src[1] = case.elsewhere[0]
    elif mutate == "destination":
        case.dst[1] = case.elsewhere[0]
    else:
        case.src[1] = 0
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_same_bits("conv_states", case.fold(fold_conv, device), expected)


@pytest.mark.parametrize("op", COMMITS)
@pytest.mark.parametrize(
    "mutate", ["newest forgotten", "newest+1", "newest-1", "pending+1", "pending at the threshold"]
)
def test_commit_mutations_are_seen(op, mutate, device):
    case = Case([4, 0], pending=[6, 3], newest=[2, 1], seed=5, poison=False)
    expected = case.expected()
    assert_same_bits("conv_states", case.commit(op, device), expected)
    if mutate == "newest forgotten":
        case.newest = None
    elif mutate.startswith("newest"):
        case.newest[case.src[0]] += 1 if mutate == "newest+1" else -1
    else:
        case.pending[case.src[0 if mutate == "pending+1" else 1]] += 1
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_same_bits("conv_states", case.commit(op, device), expected)


def test_errors_name_the_argument(device):
    case = Case([1, 2])
    states, window = case.states.to(device), case.window(device)
    slots = case.src.to(device)
    folds, rows = Folds(slots, slots, slots, slots), planned(Rows(slots, slots * 0), window, 1)
    for op in (commit_conv, commit_conv_reference):
        with pytest.raises(ValueError, match="plan: None, but an op asks for the step's plan"):
            op(states, window, replace(rows, plan=None))
        with pytest.raises(ValueError, match=r"plan: shape \(3, 11\), expected 12 numbers a row or more"):
            op(states, window, replace(rows, plan=rows.plan[:, :11]))
    for op, where in ((fold_conv, folds), (commit_conv, rows)):
        with pytest.raises(ValueError, match=r"window_inputs: shape .*, expected \[L=1, R=4, C=4, dim=6\]"):
            op(states[:1], window, where)
        with pytest.raises(ValueError, match="window_inputs: shape"):
            op(states, window.layer(0), where)
        with pytest.raises(ValueError, match=r"pending: shape \(7,\), expected \[S=6\]"):
            op(states[:, 1:], window, where)
        with pytest.raises(TypeError, match=r"conv_states: dtype torch\.float64"):
            op(states.double(), window, where)
        with pytest.raises(TypeError, match="window_inputs: dtype"):
            op(states, replace(window, inputs=window.inputs.double()), where)
        with pytest.raises(ValueError, match="width"):
            op(torch.cat([states, states], 3), window, where)


def test_ops_for():
    assert ops_for("cpu").fold_conv is fold_conv_reference
    assert ops_for("cuda").fold_conv is fold_conv
    assert ops_for("cpu").commit_conv is commit_conv_reference
    assert ops_for("cuda").commit_conv is commit_conv
