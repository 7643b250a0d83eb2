"""mamba2_fold: settle and snapshot."""

from __future__ import annotations

import math

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import VK
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.mamba2 import ops_for
from mamba_mtp_kernels.mamba2.fold import mamba2_fold
from mamba_mtp_kernels.mamba2.reference import mamba2_fold_reference
from mamba_mtp_kernels.mamba2.window import Mamba2Window

from ..helpers import assert_close, assert_same_bits, gap_between_slots

FOLDS = [pytest.param(mamba2_fold, id="kernel"), pytest.param(mamba2_fold_reference, id="reference")]
LIMIT = {torch.float32: 6e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOTS, ROWS, CAPACITY = 9, 5, 12


class Case:
    """rows of `jobs`: (src slot, dst slot, window row, count). Slots nobody reads and free entries are NaN."""

    def __init__(
        self,
        jobs,
        *,
        layers=2,
        nheads=4,
        headdim=12,
        ngroups=2,
        dstate=16,
        dtype=torch.float32,
        state_dtype=torch.float32,
        strided=False,
        device="cpu",
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        self.jobs = jobs
        self.order = torch.stack([torch.randperm(CAPACITY, generator=generator) for _ in range(ROWS)]).int()
        self.A = -0.1 - torch.rand(layers, nheads, generator=generator)
        checkpoint = randn(layers, SLOTS, nheads, headdim, dstate)
        read = {src for src, *_ in jobs}
        checkpoint[:, [slot for slot in range(SLOTS) if slot not in read]] = math.nan
        self.windows = {
            "x": randn(layers, ROWS, CAPACITY, nheads, headdim).to(dtype),
            "B": randn(layers, ROWS, CAPACITY, ngroups, dstate).to(dtype),
            "dt": torch.nn.functional.softplus(randn(layers, ROWS, CAPACITY, nheads)),
        }
        free = torch.ones(ROWS, CAPACITY, dtype=torch.bool)
        for _, _, row, count in jobs:
            if 0 <= row < ROWS:
                free[row, self.order[row, :count].long()] = False
        for name, window in self.windows.items():
            window[:, free] = math.nan
            if strided:
                self.windows[name] = torch.stack([window, torch.full_like(window, math.nan)], 1)[:, 0]
        self.checkpoint = checkpoint.to(state_dtype)
        if strided:
            self.checkpoint = gap_between_slots(self.checkpoint.flatten(0, 1), 32).unflatten(0, (layers, SLOTS))
        self.device = torch.device(device)

    def run(self, fold, *, index_dtype=torch.int32, exact=False, axis_order=None, write=VK):
        layers = self.checkpoint.shape[0]
        columns = torch.tensor(self.jobs, dtype=index_dtype, device=self.device).T.contiguous()
        base = self.checkpoint.double() if exact else self.checkpoint
        checkpoint = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=self.device).copy_(base)
        windows = {}
        for name, window in self.windows.items():
            window = window.double() if exact else window
            windows[name] = torch.empty_strided(window.shape, window.stride(), dtype=window.dtype, device=self.device)
            windows[name].copy_(window)
        assert len(self.A) == layers
        order = self.order.to(self.device)
        fold(
            States(checkpoint, axis_order, write),
            Mamba2Window(torch.zeros(SLOTS, dtype=torch.int32, device=self.device), order, 0, **windows),
            Folds(*columns),
            A=self.A.to(self.device),
            **({"compute_dtype": torch.float64} if exact else {}),
        )
        return checkpoint.cpu()

    def check(self, fold, **extra):
        actual, expected = self.run(fold, **extra), self.run(mamba2_fold_reference, exact=True)
        written = []
        for src, dst, _, count in self.jobs:
            if src <= 0 or dst <= 0:
                continue
            if count == 0:
                assert_same_bits(f"copy {src}->{dst}", actual[:, dst], self.checkpoint[:, src])
            else:
                assert_close(f"{src}->{dst}", actual[:, dst], expected[:, dst], LIMIT[actual.dtype])
            written.append(dst)
        rest = [slot for slot in range(SLOTS) if slot not in written]
        assert_same_bits("other slots", actual[:, rest], self.checkpoint[:, rest])
        return actual


@pytest.mark.parametrize("fold", FOLDS)
def test_settle_snapshot_copy_and_padding(fold, device):
    jobs = [(1, 1, 0, 5), (2, 6, 1, 3), (3, 3, 2, 0), (4, 7, 99999, 0), (0, 5, 3, 2), (-1, -1, -5, 1), (5, 0, 3, 2)]
    Case(jobs, device=device).check(fold)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("count", [1, 2, 3, CAPACITY])
def test_counts(fold, count, device):
    Case([(3, 8, 4, count), (2, 2, 0, 1)], device=device).check(fold, index_dtype=torch.int64)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(fold, dtype, state_dtype, device):
    Case([(1, 1, 0, 6), (2, 5, 1, 4)], dtype=dtype, state_dtype=state_dtype, device=device).check(fold)


@pytest.mark.parametrize(("headdim", "dstate"), [(5, 16), (40, 24), (33, 130)])
def test_head_sizes_and_strides(headdim, dstate, device):
    Case([(1, 1, 0, 6), (2, 5, 1, 4)], headdim=headdim, dstate=dstate, strided=True, device=device).check(mamba2_fold)


@pytest.mark.parametrize("fold", FOLDS)
def test_two_folds_and_one(fold, device):
    """The reference is plain recurrence: where it is cut does not matter. The kernel rounds the state once a fold: two
    folds' states are as exact as one's, and differ in the last bits."""
    whole = Case([(1, 1, 0, 7)], device=device)
    first = Case([(1, 1, 0, 7)], device=device)
    first.jobs = [(1, 1, 0, 4)]
    second = Case([(1, 1, 0, 7)], device=device)
    second.checkpoint = first.run(fold)
    second.order = second.order.roll(-4, 1)
    second.jobs = [(1, 1, 0, 3)]
    twice, once = second.run(fold)[:, 1], whole.run(fold)[:, 1]
    if fold is mamba2_fold_reference:
        assert_same_bits("state", twice, once)
    exact = whole.run(mamba2_fold_reference, exact=True)[:, 1]
    assert_close("once", once, exact, 1.5e-7)
    assert_close("twice", twice, exact, 1.5e-7)


@pytest.mark.parametrize("mutate", ["count+1", "count-1", "order", "decay", "row"])
def test_mutations_are_seen(mutate, device):
    case = Case([(1, 1, 0, 4), (2, 2, 1, 5)], device=device)
    expected = case.run(mamba2_fold_reference, exact=True)
    if mutate.startswith("count"):
        case.jobs[0] = (1, 1, 0, 4 + (1 if mutate == "count+1" else -1))
        for window in case.windows.values():
            window.nan_to_num_(0.5)
    elif mutate == "order":
        case.order[0, :2] = case.order[0, :2].flip(0)
    elif mutate == "decay":
        case.A = case.A.flip(0)
    else:
        case.jobs[0] = (1, 1, 1, 4)
    actual = case.run(mamba2_fold)
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close("state", actual[:, 1], expected[:, 1], 1e-4)


def test_errors_name_the_argument(device):
    case = Case([(1, 1, 0, 1)], device=device)
    case.A = case.A[:, 1:]
    with pytest.raises(ValueError, match="A: shape"):
        case.run(mamba2_fold)


def test_ops_for():
    assert ops_for("cpu").mamba2_fold is mamba2_fold_reference
    assert ops_for("cuda").mamba2_fold is mamba2_fold
