"""gdn_fold against the float64 recurrence: settle, snapshot, copy, skip."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.gdn.reference import gdn_fold_reference
from mamba_mtp_kernels.gdn.window import GdnWindow

from ..helpers import assert_close, assert_same_bits
from .case import make_case
from .checks import FLOAT32_LIMIT, implementation, positions_in_storage, storage_of

TOKENS = 16
"""Pending tokens that fold at once."""

FOLD_LIMIT = 4e-7
"""Of a float32 state after one or two folds."""

BOTH = pytest.mark.parametrize("which", ["triton", "reference"])


def layered(x: torch.Tensor, layers: int, gap: int) -> torch.Tensor:
    """`layers` different copies of x, each `gap` NaN elements after the last."""
    inner = x.numel()
    flat = torch.full((layers, inner + gap), float("nan"), dtype=x.dtype, device=x.device)
    view = flat[:, :inner].view(layers, *x.shape)
    for layer in range(layers):
        view[layer] = x.roll(layer, -1) if x.shape[-1] > 1 else x
    return view


@pytest.mark.in_turn
@BOTH
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("K", "V"), [(16, 16), (40, 24)])
def test_fold(
    which: str, K: int, V: int, state_dtype: torch.dtype, index_dtype: torch.dtype, device: torch.device
) -> None:
    """One batch with every kind of row: settle, snapshot elsewhere, plain copy, nothing to do, padding."""
    case = make_case(
        batch=8, nodes=3, H=1, HV=2, K=K, V=V, fold_threshold=5, pending=[5, 8, 1, 3, 0, 0, 4, 6],
        state_dtype=state_dtype, index_dtype=index_dtype, device=device,
    )  # fmt: skip
    books = case.books
    slots = books.slots.cpu()
    counts = books.pending.cpu()[slots.long()].clone()
    src, dst, rows = slots.clone(), slots.clone(), books.rows.cpu().clone()
    # NaN lies in the spare slots, so each snapshot must write its destination whole
    spare = [s for s in range(1, books.pending.shape[0]) if s not in slots.tolist()]
    dst[2], dst[3], dst[4] = spare[0], spare[1], spare[2]
    counts[3] = 2  # a snapshot inside the pending run
    rows[4] = -1_000_000  # a plain copy reads no window
    src[6], dst[7] = 0, -1
    written = [0, 1, 2, 3, 4]
    pool = layered(case.tensors["checkpoint"], 2, 8)
    window = case.window(lambda x: layered(x, 2, 16))
    folds = Folds(src.to(device), dst.to(device), rows.to(device), counts.to(device=device, dtype=index_dtype))
    exact = pool.double()
    doubles = {name: getattr(window, name).double() for name in GdnWindow.input_names()}
    gdn_fold_reference(States(exact), books.window(GdnWindow, **doubles), folds, compute_dtype=torch.float64)
    old = storage_of(pool).clone()
    old_inputs = {name: storage_of(getattr(window, name)).clone() for name in GdnWindow.input_names()}
    implementation(which, device)[1](States(pool), window, folds)

    targets = dst[written].long()
    # bf16: half a unit in the last place of rounding, a whole one where the interpreter truncates
    slack = 0.0 if state_dtype == torch.float32 else (0.4 if pool.is_cuda else 0.8) * torch.finfo(state_dtype).eps
    for layer in range(2):
        assert_close("state", pool[layer].cpu()[targets], exact[layer].cpu()[targets], FLOAT32_LIMIT + slack)
        assert_same_bits("copy", pool[layer][dst[4]], pool[layer][src[4]])
    layers = torch.arange(2)[:, None].expand(2, len(written))
    rest = torch.ones(old.shape, dtype=torch.bool)
    rest[positions_in_storage(pool, (layers, targets.expand(2, -1)))] = False
    assert_same_bits("checkpoint, slots that are no destination", storage_of(pool)[rest], old[rest])
    for name, before in old_inputs.items():
        assert_same_bits(name, storage_of(getattr(window, name)), before)


@BOTH
@pytest.mark.parametrize(("count", "cut"), [(8, 3), (20, 16)], ids=["inside a step", "between steps"])
def test_two_folds_and_one(which: str, count: int, cut: int, device: torch.device) -> None:
    """The reference is plain recurrence: where it is cut does not matter. The kernel rounds the state once a step of 16
    tokens: between steps a cut changes no bits; elsewhere two folds' states are as exact as one's."""
    fold = implementation(which, device)[1]
    case = make_case(batch=1, nodes=4, H=1, HV=2, fold_threshold=16, pending=[count], device=device)
    window, row, slot = case.window(lambda x: x[None]), int(case.books.rows[0]), case.books.slots
    states = []
    for cuts in ((0, count), (0, cut, count)):
        pool, order = case.tensors["checkpoint"].clone()[None], case.books.order.clone()
        for start, stop in pairwise(cuts):
            order[row] = case.books.order[row].roll(-start)
            counts = torch.tensor([stop - start], dtype=torch.int32, device=device)
            fold(States(pool), replace(window, order=order), Folds(slot, slot, case.books.rows, counts))
        states.append(pool[0, slot.long()])
    exact = case.clone()
    exact.tensors = {name: tensor.double() for name, tensor in exact.tensors.items()}
    exact.fold(partial(gdn_fold_reference, compute_dtype=torch.float64), case.books.settling())
    want = exact.tensors["checkpoint"][slot.long()]
    assert_close("once", states[0], want, FOLD_LIMIT)
    assert_close("twice", states[1], want, FOLD_LIMIT)
    if which == "reference" or cut % TOKENS == 0:
        assert_same_bits("checkpoint", states[1], states[0])


def test_rejected_arguments(device: torch.device) -> None:
    case = make_case(batch=1, device=device)
    fold, folds, window = implementation("triton", device)[1], case.books.settling(), case.window(lambda x: x[None])
    pool = case.tensors["checkpoint"][None]
    with pytest.raises(ValueError, match=r"window_k: shape .*, expected \[L=1, .*K=16\]"):
        fold(States(pool), replace(window, k=window.k[..., :3].contiguous()), folds)
    with pytest.raises(ValueError, match="window_k: shape"):
        fold(States(pool), case.window(), folds)
    with pytest.raises(TypeError, match="window_g: dtype"):
        fold(States(pool), replace(window, g=window.g.double(), beta=window.beta.double()), folds)
    with pytest.raises(TypeError, match=r"states: dtype torch\.float64"):
        fold(States(pool.double()), window, folds)
    with pytest.raises(ValueError, match="states: strides"):
        fold(States(pool.transpose(2, 3).contiguous().transpose(2, 3)), window, folds)
    with pytest.raises(TypeError, match="counts"):
        replace(folds, counts=folds.counts.float())
