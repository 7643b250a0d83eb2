"""Pieces of prepare_products.py: what it works out of products of keys, in a warp's lanes (jit helpers only).

Tokens, blocks and matrices are those of block_products.py. Of what differs by head there are one or two matrices, one
after the other in a tuple: the rows of one head and of the other, both heads' nodes in one, or one head's in two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import LANES, from_lane, pair_cut, pair_rounded, row_and_column, without_cut
from .block_products import BLOCK


@triton.jit
def at_columns(x, first, NATIVE: tl.constexpr):
    """(even, odd) columns of what belongs to tokens g, as lane `first` of each four holds it."""
    _, t = row_and_column()
    return (from_lane(x, 8 * t + first, NATIVE), from_lane(x, 8 * t + 4 + first, NATIVE))


@triton.jit
def _decays_after(even, odd, NATIVE: tl.constexpr):
    """Products of a row's decays after each column of a block, and of all of them."""
    g, t = row_and_column()
    both = even * odd
    after = tl.full([LANES], 1.0, tl.float32)
    for ahead in tl.static_range(1, 4):
        there = from_lane(both, g * 4 + tl.minimum(t + ahead, 3), NATIVE)
        after = after * tl.where(t + ahead < 4, there, 1.0)
    return after * odd, after, from_lane(both * after, g * 4, NATIVE)


@triton.jit
def decays_after(decays, NATIVE: tl.constexpr):
    """d of all tokens, the product of the decays on a row's path after them; and of the whole path, a head each."""
    products = ()
    later = ()
    for i in tl.static_range(len(decays)):
        of_block = ()
        of_path = ()
        for half in tl.static_range(len(decays[i]) // 2):
            even, odd, of_all = _decays_after(decays[i][2 * half], decays[i][2 * half + 1], NATIVE)
            if i > 0:
                even, odd, of_all = even * later[half], odd * later[half], of_all * later[half]
            of_block = of_block + (even, odd)  # noqa: RUF005 (jit: no unpacking)
            of_path = of_path + (of_all,)  # noqa: RUF005
        products = products + (of_block,)  # noqa: RUF005
        later = of_path
    return products, later


@triton.jit
def _take(rest, weights, products, j: tl.constexpr, NATIVE: tl.constexpr):
    """R of a block and the older ones less what the block's token j takes: z times its key's products."""
    g, t = row_and_column()
    z = ()
    for half in tl.static_range(len(weights) // 2):
        own = rest[0][2 * half + j % 2] * weights[2 * half + j % 2]
        z = z + (from_lane(own, g * 4 + j // 2, NATIVE),)  # noqa: RUF005 (jit: no unpacking)
    left = ()
    for i in tl.static_range(len(rest)):
        r = rest[i]
        if i == 0 and j == 0:  # (the oldest of its block)
            left = left + (r,)  # noqa: RUF005
        else:
            even, odd = from_lane(products[i][0], j * 4 + t, NATIVE), from_lane(products[i][1], j * 4 + t, NATIVE)
            less = ()
            for half in tl.static_range(len(z)):
                less = less + (  # noqa: RUF005
                    tl.fma(-z[half], even, r[2 * half]), tl.fma(-z[half], odd, r[2 * half + 1]),
                )  # fmt: skip
            left = left + (less,)  # noqa: RUF005
    return left


@triton.jit
def solve(
    residuals, weights, products, NODE_BLOCKS: tl.constexpr, NODES: tl.constexpr, PENDING: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """R of all tokens, from s q . k of all. Blocks of nodes come first, the others are pending tokens'.

    weights: beta r^2 of all tokens, zero off a node's path. products: of every block's keys with those of itself and of
    the older ones.
    """
    solved = ()
    rest = residuals
    for i in tl.static_range(len(residuals)):
        for j in tl.static_range(BLOCK - 1, -1, -1):
            # beyond the last node, and beyond the most that may stay pending, there is no token
            if i < NODE_BLOCKS:
                if (NODE_BLOCKS - 1 - i) * BLOCK + j < NODES:
                    rest = _take(rest, weights[i], products[i], j, NATIVE)
            elif (len(residuals) - 1 - i) * BLOCK + j < PENDING:
                rest = _take(rest, weights[i], products[i], j, NATIVE)
        solved = solved + (rest[0],)  # noqa: RUF005 (jit: no unpacking)
        older = ()
        for k in tl.static_range(1, len(rest)):
            older = older + (rest[k],)  # noqa: RUF005
        rest = older
    return solved


@triton.jit
def two_at_a_time(blocks):
    """Blocks as mma sums over them: two, and what is left over."""
    pairs = ()
    for i in tl.static_range(0, len(blocks), 2):
        if i + 1 < len(blocks):  # noqa: SIM108 (known when compiled: the other has no type)
            pairs = pairs + ((blocks[i], blocks[i + 1]),)  # noqa: RUF005 (jit: no unpacking)
        else:
            pairs = pairs + ((blocks[i],),)  # noqa: RUF005
    return pairs


@triton.jit
def _left_factor(blocks, LAST: tl.constexpr, NATIVE: tl.constexpr):
    """Two blocks, or one, as mma's left factor. LAST: the last of its addends."""
    left = ()
    for i in tl.static_range(len(blocks)):
        b = blocks[i]
        for half in tl.static_range(2):
            if 2 * half >= len(b):
                left = left + (tl.zeros([LANES], tl.int32),)  # noqa: RUF005 (jit: no unpacking)
            elif LAST:
                left = left + (pair_rounded(b[2 * half], b[2 * half + 1], NATIVE),)  # noqa: RUF005
            else:
                left = left + (pair_cut(b[2 * half], b[2 * half + 1]),)  # noqa: RUF005
    return left


@triton.jit
def left_factors(blocks, ADDENDS: tl.constexpr, NATIVE: tl.constexpr):
    """All tokens' in as many addends of 8 bits, the smallest first: each a tuple of mma's left factors."""
    addends = ()
    for part in tl.static_range(ADDENDS):
        factors = ()
        pairs = two_at_a_time(blocks)
        for i in tl.static_range(len(pairs)):
            factors = factors + (_left_factor(pairs[i], part == ADDENDS - 1, NATIVE),)  # noqa: RUF005 (jit: no unpacking)
        addends = (factors,) + addends  # noqa: RUF005
        rests = ()
        for i in tl.static_range(len(blocks)):
            rest = ()
            for j in tl.static_range(len(blocks[i])):
                rest = rest + (without_cut(blocks[i][j]),)  # noqa: RUF005
            rests = rests + (rest,)  # noqa: RUF005
        blocks = rests
    return addends
