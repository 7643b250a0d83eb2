"""The fold as a product: its arithmetic in plain torch, its jit helpers, and one result whoever folds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from mamba_mtp_kernels.common.fragments import (
    addends,
    as_left,
    as_tile,
    in_product_order,
    per_column,
    per_row,
    tile_column,
    tile_row,
)
from mamba_mtp_kernels.mamba2.fold import mamba2_fold
from mamba_mtp_kernels.mamba2.verify_replay import mamba2_verify

from ..helpers import DTYPE_PAIRS, FOLDING, assert_close, assert_same_bits, folded_by, rms_ratio, settled_by
from .case import WINDOWS, make_case
from .slots_case import turn

# ------------------------------------------------------------------------------------------------- the arithmetic


def cut(x: torch.Tensor) -> torch.Tensor:
    """x float32 without the bits that bf16 has not got."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def in_addends(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """x float32 as `count` bf16 numbers (held in float32), the smallest first."""
    parts, rest = [], x
    for _ in range(count - 1):
        parts.append(cut(rest))
        rest = rest - parts[-1]
    return [*reversed([*parts, rest.bfloat16().float()])]


def emulated_fold(state, x, B, dt, A, count: int = 3) -> torch.Tensor:
    """One fold as on tensor cores. state [P, D] float32, x [T, P] and B [T, D] bf16, dt [T] float32, A < 0."""
    g = A.double() * dt.double()
    total = g.sum()
    weight = dt * (total - g.cumsum(0)).exp().float()
    added = torch.zeros_like(state)
    for part in in_addends((x.float() * weight[:, None]).T.contiguous(), count):
        added = added + part @ B.float()
    return (state.double() * total.exp().float() + added.double()).float()


def plain_fold(state, x, B, dt, A) -> torch.Tensor:
    """Token by token in the dtype of state, as plain decode."""
    for t in range(x.shape[0]):
        step, rate = dt[t].to(state.dtype), A.to(state.dtype)
        state = state * (rate * step).exp() + (B[t].to(state.dtype) * step) * x[t].to(state.dtype)[:, None]
    return state


def tokens(generator: torch.Generator, count: int, decay: float) -> tuple[torch.Tensor, ...]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    dt = torch.nn.functional.softplus(randn(count))
    return randn(count, 80).bfloat16(), randn(count, 128).bfloat16(), dt, torch.tensor(-decay)


@pytest.mark.parametrize("decay", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 9, 16, 40])
def test_one_fold_is_as_exact_as_float32(count, decay):
    generator = torch.Generator().manual_seed(count)
    state, given = torch.randn(80, 128, generator=generator), tokens(generator, count, decay)
    exact = plain_fold(state.double(), *given)
    product = rms_ratio(emulated_fold(state, *given), exact)
    assert product <= 1e-7, product
    # an addend less is seen, wherever the tokens still count
    assert rms_ratio(emulated_fold(state, *given, count=2), exact) > 5 * product


@pytest.mark.parametrize("decay", [1e-4, 0.01])
def test_folds_drift_less_than_plain_decode(decay):
    """One rounding a fold beats one a token."""
    generator = torch.Generator().manual_seed(0)
    product = plain = torch.randn(80, 128, generator=generator)
    exact = product.double()
    for _ in range(256):
        given = tokens(generator, 9, decay)
        product, plain, exact = emulated_fold(product, *given), plain_fold(plain, *given), plain_fold(exact, *given)
    assert rms_ratio(product, exact) <= rms_ratio(plain, exact)


# ----------------------------------------------------------------------------------------------------- the helpers


@triton.jit
def _cut_kernel(x, out, N: tl.constexpr, PARTNER: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, N)
    parts = addends(tl.load(x + index), PARTNER, COUNT)
    for i in tl.static_range(COUNT):
        tl.store(out + i * N + index, parts[i].to(tl.float32))


@pytest.mark.parametrize("partner", [tl.bfloat16, tl.float16], ids=["bf16", "tf32"])
def test_three_addends_are_the_number_and_two_nearly(partner, device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1024, generator=generator) * torch.logspace(-18, 18, 1024)
    for count in (2, 3):
        out = torch.full((count, 1024), float("nan"), device=device)
        _cut_kernel[(1,)](x.to(device), out, 1024, partner, count)
        parts = out.cpu().double()
        if partner == tl.bfloat16:
            assert torch.equal(parts, parts.bfloat16().double())
        lost = ((parts.sum(0) - x.double()) / x.double()).abs().max()
        # (the interpreter cuts where a GPU rounds to bf16: half a bit)
        assert lost <= {(tl.bfloat16, 2): 2.0**-15, (tl.float16, 2): 2.0**-21}.get((partner, count), 0.0)
    if partner == tl.bfloat16:
        assert_same_bits("addends", out.cpu(), torch.stack(in_addends(x, 3)))


@triton.jit
def _order_kernel(
    x, left, right, back, BLOCK_P: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, WARPS: tl.constexpr
):
    rows, columns = tl.arange(0, BLOCK_P), tl.arange(0, PART)
    plain = rows[:, None] * PART + columns[None, :]
    at = per_row(tile_row(BLOCK_P, WARPS)) * PART + per_column(tile_column(PART, CHUNK))
    renamed = as_left(tl.load(x + at), WARPS)
    tl.store(left + plain, renamed)
    tl.store(right + plain, in_product_order(tl.load(x + plain), CHUNK))
    tl.store(back + at, as_tile(renamed, CHUNK, WARPS))


@pytest.mark.parametrize(("warps", "block"), [(1, 16), (1, 32), (2, 32), (4, 128)])
@pytest.mark.parametrize(("part", "chunk"), [(16, 16), (64, 16), (64, 32)])
def test_names_of_rows_and_columns(warps, block, part, chunk, device):
    """Both factors of a product name the columns alike, rows keep their names, and as_tile undoes as_left."""
    x = torch.arange(block * part, dtype=torch.float32, device=device).view(block, part)
    left, right, back = (torch.full_like(x, -1) for _ in range(3))
    _order_kernel[(1,)](x, left, right, back, block, part, chunk, warps, num_warps=warps)
    assert torch.equal(left, right) and torch.equal(back, x)
    named = left[0].long().tolist()
    # lane t of a tensor core holds columns 2t, 2t + 1, 2t + 8, 2t + 9 of each 16: neighbours in memory
    for start in range(0, part, 16):
        for t in range(4):
            held = [named[start + k] for k in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
            assert held == list(range(held[0], held[0] + 4)) and held[0] % 4 == 0


# ------------------------------------------------------------------------------------------------- whoever folds


settle = partial(settled_by, mamba2_fold)


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [*FOLDING, {"headdim": 33, "dstate": 40, "nheads": 3, "ngroups": 3}], ids=str)
@DTYPE_PAIRS
def test_fold_then_verify_has_the_bits_of_a_verify_that_folds(dtype, state_dtype, options, device):
    given = {"nodes": 4, "tree": True, "nheads": 2, "fold_threshold": 8, "pending": [9, 12, 10]} | options
    folding = make_case(**given, dtype=dtype, state_dtype=state_dtype, device=device)
    settled = folding.clone()
    y = folding.run(mamba2_verify)
    folded_by(mamba2_fold, settled)
    assert_same_bits("checkpoint", settled.tensors["checkpoint"], folding.tensors["checkpoint"])
    assert_same_bits("y", settled.run(mamba2_verify), y)


def test_settle_has_a_verifys_bits_in_either_axis_order(device):
    folding = make_case(nodes=3, nheads=2, pending=[7, 9, 8], dtype=torch.bfloat16, dstate=32, device=device)
    order = torch.zeros(folding.tensors["checkpoint"].shape[0], dtype=torch.uint8, device=device)
    turned = folding.books.slots[:2].tolist()
    turn(folding.tensors["checkpoint"], turned)
    order[turned] = 1
    settled = folding.clone()
    folding.run(mamba2_verify, axis_order=order)
    settle(settled, order)
    assert_same_bits("checkpoint", settled.tensors["checkpoint"], folding.tensors["checkpoint"])


def test_a_snapshot_has_the_bits_of_settling_in_place(device):
    case = make_case(nodes=3, nheads=2, pending=[3, 9, 6], dtype=torch.bfloat16, device=device)
    taken = case.clone()
    free = [slot for slot in range(1, case.books.pending.shape[0]) if slot not in case.books.slots.tolist()][:3]
    settle(taken, dst=torch.tensor(free, dtype=torch.int32, device=device))
    settle(case)
    assert_same_bits("states", taken.tensors["checkpoint"][free], case.tensors["checkpoint"][case.books.slots.long()])


def test_the_windows_size_changes_no_bits(device):
    """The same tokens in a window that holds more: only zeros are added."""
    small = make_case(nodes=4, nheads=2, fold_threshold=8, pending=[9, 12, 10], dtype=torch.bfloat16, device=device)
    large = make_case(nodes=4, nheads=2, fold_threshold=40, pending=[9, 12, 10], dtype=torch.bfloat16, device=device)
    for name in ("x", "dt", "B", "C", "A", "D", "dt_bias", "checkpoint"):
        large.tensors[name] = small.tensors[name].clone()
    large.books.slots, large.books.pending = small.books.slots, small.books.pending.clone()
    for b in range(3):
        count = small.books.pending_of(b)
        row, wide = int(small.books.rows[b]), int(large.books.rows[b])
        at, to = small.books.order[row, :count].long(), large.books.order[wide, :count].long()
        for name in WINDOWS:
            large.tensors[name][wide, to] = small.tensors[name][row, at]
    settle(large)
    small.run(mamba2_verify)
    assert_same_bits("checkpoint", large.tensors["checkpoint"], small.tensors["checkpoint"])


def test_a_16_bit_output_is_rounded_once(device):
    """Two addends instead of three: what they lack is far below the rounding of the output."""
    # (where it stores bf16 the interpreter cuts instead of rounding)
    for dtype, limit in ((torch.bfloat16, 1.02 if device.type == "cuda" else 2.0), (torch.float16, 1.02)):
        case = make_case(nodes=5, tree=True, nheads=2, pending=[0, 6, 11], dtype=dtype, dstate=64, device=device)
        exact, _ = case.clone().oracle()
        assert rms_ratio(case.run(mamba2_verify), exact) <= limit * rms_ratio(exact.to(dtype), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 80, 8, 128), (48, 64, 1, 256)], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_settle_has_a_verifys_bits_at_model_heads(state_dtype, shape, device):
    nheads, headdim, ngroups, dstate = shape
    for nodes, window in ((4, 8), (8, 16), (16, 20)):
        folding = make_case(
            batch=6, nodes=nodes, tree=True, nheads=nheads, headdim=headdim, ngroups=ngroups, dstate=dstate,
            fold_threshold=window, pending=[window + 1, window + nodes, 0, window, window + 2, 3],
            dtype=torch.bfloat16, state_dtype=state_dtype, device=device,
        )  # fmt: skip
        settled = folding.clone()
        y = folding.run(mamba2_verify)
        folded_by(mamba2_fold, settled)
        assert_same_bits("checkpoint", settled.tensors["checkpoint"], folding.tensors["checkpoint"])
        assert_close("y", settled.run(mamba2_verify), y, 1e-7)
