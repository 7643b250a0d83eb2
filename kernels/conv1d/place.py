"""Where a program of the convolution writes its outputs: the parts of parts.py (jit helpers only)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.fragments import inside as fits


@triton.jit
def part_of(
    number, row, result, first, second, row_strides, token_strides,
    WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, RESULT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of program `number` of a row: its channels, whether they are there, and where their outputs go (`output_at`).

    result: pointer to the row's first node. first, second: to what is kept, whose two strides are told.
    """
    BLOCKS_0: tl.constexpr = (WIDTH_0 + BLOCK_D - 1) // BLOCK_D
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (WIDTH_1 + BLOCK_D - 1) // BLOCK_D
    is_0 = number < BLOCKS_0
    is_2 = number >= BLOCKS_1
    begin = tl.where(is_0, 0, tl.where(is_2, WIDTH_0 + WIDTH_1, WIDTH_0))
    blocks = tl.where(is_0, 0, tl.where(is_2, BLOCKS_1, BLOCKS_0))
    end = tl.where(is_0, WIDTH_0, tl.where(is_2, WIDTH_0 + WIDTH_1 + WIDTH_2, WIDTH_0 + WIDTH_1))
    WHOLE: tl.constexpr = WIDTH_0 % BLOCK_D + WIDTH_1 % BLOCK_D + WIDTH_2 % BLOCK_D == 0
    start = number * BLOCK_D if WHOLE else begin + (number - blocks) * BLOCK_D
    channel = start + tl.arange(0, BLOCK_D)
    if WIDTH_1 == 0:
        at = result
        stride = WIDTH_0
        kept = False
    else:
        if RESULT == 0:
            kept = number >= BLOCKS_0
            stride = WIDTH_0
        elif RESULT == 1:
            kept = is_0 | is_2
            stride = WIDTH_1
        else:
            kept = number < BLOCKS_1
            stride = WIDTH_2
        at = first
        row_stride, _ = row_strides
        token_stride, _ = token_strides
        if WIDTH_2 > 0:
            is_second = number >= BLOCKS_0 if RESULT == 2 else is_2
            at = tl.where(is_second, second, first)
            row_stride = tl.where(is_second, row_strides[1], row_stride)
            token_stride = tl.where(is_second, token_strides[1], token_stride)
        at = tl.where(kept, at + row * row_stride, result)
        stride = tl.where(kept, token_stride, stride)
    return channel, fits(channel, end, WHOLE), (at, stride, kept, channel - begin)


@triton.jit
def output_at(to, node, position):
    """Where a node's outputs go: `node` counts from its row's first, `position` is its place in the window."""
    at, stride, kept, channel = to
    return at + (tl.where(kept, position, node) * stride + channel)
