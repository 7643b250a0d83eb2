"""A warp's lanes against matrices: interpreted without a GPU, by their instructions with one."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from mamba_mtp_kernels.common import lanes

NATIVE = not triton.knobs.runtime.interpret


@triton.jit
def _multiply_kernel(left, right, acc, out, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """left: [PAIRS, 2 halves, 32] pairs, right: [PAIRS, 32] pairs, acc and out: [4, 32]."""
    lane = tl.arange(0, 32)
    true = lane >= 0
    upper_and_lower = ()
    columns = ()
    for i in tl.static_range(PAIRS):
        for half in tl.static_range(2):
            upper_and_lower = upper_and_lower + (lanes.load(left + (2 * i + half) * 32 + lane, true, 0, NATIVE),)  # noqa: RUF005
        columns = columns + (lanes.load(right + i * 32 + lane, true, 0, NATIVE),)  # noqa: RUF005
    sums = ()
    for i in tl.static_range(4):
        sums = sums + (lanes.load(acc + i * 32 + lane, true, 0.0, NATIVE),)  # noqa: RUF005
    found = lanes.mma(upper_and_lower, columns, sums, NATIVE)
    for i in tl.static_range(4):
        lanes.store(out + i * 32 + lane, found[i], true, NATIVE)


def in_pairs(matrix: torch.Tensor) -> torch.Tensor:
    """An 8 x 8 matrix of bf16 as lanes hold it, [32] int32."""
    return matrix.contiguous().view(torch.int32).reshape(32)


@pytest.mark.parametrize("pairs", [1, 2])
def test_products(pairs: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(pairs)
    left = torch.randn(16, 8 * pairs, generator=generator).bfloat16()
    right = torch.randn(8, 8 * pairs, generator=generator).bfloat16()
    acc = torch.randn(16, 8, generator=generator)
    of_left = [in_pairs(left[h : h + 8, c : c + 8]) for c in range(0, 8 * pairs, 8) for h in (0, 8)]
    of_right = [in_pairs(right[:, c : c + 8]) for c in range(0, 8 * pairs, 8)]
    halves = acc.view(2, 32, 2).permute(0, 2, 1).contiguous()
    out = torch.empty(4, 32, device=device)
    on_device = [x.to(device) for x in (torch.stack(of_left), torch.stack(of_right), halves)]
    _multiply_kernel[(1,)](*on_device, out, pairs, NATIVE, num_warps=1)
    got = out.cpu().view(2, 2, 32).permute(0, 2, 1).reshape(16, 8)
    want = acc.double() + left.double() @ right.double().T
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@triton.jit
def _moves_kernel(x, y, out, NATIVE: tl.constexpr):
    """x: [32, 8] bf16, y: [2, 32] float32; out: [5, 32] int32 and [32, 8] bf16."""
    lane = tl.arange(0, 32)
    words = out
    pairs = lanes.load_pairs(x + 8 * lane, lane % 3 != 0, NATIVE)
    lanes.store(words + lane, lanes.turn(pairs[1], NATIVE), lane >= 0, NATIVE)
    even = lanes.load(y + lane, lane >= 0, 0.0, NATIVE)
    odd = lanes.load(y + 32 + lane, lane < 30, 7.5, NATIVE)
    lanes.store(words + 32 + lane, lanes.pair_cut(even, odd), lane != 4, NATIVE)
    lanes.store(words + 64 + lane, lanes.pair_rounded(lanes.without_cut(even), odd, NATIVE), lane >= 0, NATIVE)
    lanes.store(words + 96 + lane, lanes.from_lane(lane, 31 - lane, NATIVE), lane >= 0, NATIVE)
    lanes.store(
        words + 128 + lane, lanes.from_lane(odd, lane % 4 * 8, NATIVE).to(tl.int32, bitcast=True), lane >= 0, NATIVE
    )
    lanes.store_pairs((words + 160).to(tl.pointer_type(tl.bfloat16)) + 8 * lane, pairs, lane != 5, NATIVE)


def test_moves(device: torch.device) -> None:
    """Turned matrices, shuffles, roundings, and loads and stores of which some lanes take no part."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator).bfloat16()
    y = torch.randn(2, 32, generator=generator)
    out = torch.full((160 + 128,), -1, dtype=torch.int32, device=device)
    _moves_kernel[(1,)](x.to(device), y.to(device), out, NATIVE, num_warps=1)
    turned, cut, rounded, mirrored, shuffled = out.cpu()[:160].view(5, 32)
    back = out.cpu()[160:].view(torch.bfloat16).view(32, 8)

    lane = torch.arange(32)
    loaded = torch.where((lane % 3 != 0)[:, None], x, 0)
    kept = loaded.clone()
    kept[5] = torch.tensor([-1], dtype=torch.int32).view(torch.bfloat16).repeat(4)
    assert torch.equal(back.view(torch.int16), kept.view(torch.int16))
    matrix = loaded[:, 2:4].reshape(8, 8)
    assert torch.equal(turned.view(torch.bfloat16).view(8, 8), matrix.T)

    even, odd = y[0], torch.where(lane < 30, y[1], 7.5)

    def cut_off(z: torch.Tensor) -> torch.Tensor:
        return (z.view(torch.int32) & -65536).view(torch.float32)

    want = torch.stack([cut_off(even), cut_off(odd)], 1).bfloat16()
    want[4] = torch.tensor([-1], dtype=torch.int32).view(torch.bfloat16)
    assert torch.equal(cut.view(torch.bfloat16).view(32, 2).view(torch.int16), want.view(torch.int16))
    want = torch.stack([even - cut_off(even), odd], 1).bfloat16()
    got = rounded.view(torch.bfloat16).view(32, 2)
    # (Triton's interpreter cuts off where it should round)
    torch.testing.assert_close(got, want, rtol=0 if NATIVE else 2**-7, atol=0)
    assert torch.equal(mirrored, 31 - lane.int())
    assert torch.equal(shuffled.view(torch.float32), odd[lane % 4 * 8])
