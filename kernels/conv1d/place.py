"""Where a program of the convolution writes its outputs: the parts of parts.py (jit helpers only)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of(
    number, result, first, second, stride_first, stride_second,
    WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, RESULT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of program `number`: its first channel, its part's end, and where that lies (for `output_at`).

    result, first, second: pointers to a row's first node, and to its windows.
    """
    start = number * BLOCK_D
    end = WIDTH_0
    kept = RESULT != 0
    if RESULT == 0:
        at = result
        stride = WIDTH_0
    else:
        at = first
        stride = stride_first
    if WIDTH_1 > 0:
        BLOCKS_0: tl.constexpr = (WIDTH_0 + BLOCK_D - 1) // BLOCK_D
        later = number >= BLOCKS_0
        start = tl.where(later, WIDTH_0 + (number - BLOCKS_0) * BLOCK_D, start)
        end = tl.where(later, WIDTH_0 + WIDTH_1, end)
        kept = tl.where(later, RESULT != 1, kept)
        if RESULT == 1:
            at = tl.where(later, result - WIDTH_0, at)
            stride = tl.where(later, WIDTH_1, stride)
        elif RESULT == 0:
            at = tl.where(later, first - WIDTH_0, at)
            stride = tl.where(later, stride_first, stride)
        else:
            at = tl.where(later, second - WIDTH_0, at)
            stride = tl.where(later, stride_second, stride)
    if WIDTH_2 > 0:
        BLOCKS_1: tl.constexpr = (WIDTH_0 + BLOCK_D - 1) // BLOCK_D + (WIDTH_1 + BLOCK_D - 1) // BLOCK_D
        last = number >= BLOCKS_1
        start = tl.where(last, WIDTH_0 + WIDTH_1 + (number - BLOCKS_1) * BLOCK_D, start)
        end = tl.where(last, WIDTH_0 + WIDTH_1 + WIDTH_2, end)
        kept = tl.where(last, RESULT != 2, kept)
        if RESULT == 2:
            at = tl.where(last, result - (WIDTH_0 + WIDTH_1), at)
            stride = tl.where(last, WIDTH_2, stride)
        else:
            at = tl.where(last, second - (WIDTH_0 + WIDTH_1), at)
            stride = tl.where(last, stride_second, stride)
    return start, end, (at, stride, kept)


@triton.jit
def output_at(to, node, position, channel):
    """Where a node's outputs go: `node` counts from its row's first, `position` is its place in the window."""
    at, stride, kept = to
    return at + tl.where(kept, position, node) * stride + channel
