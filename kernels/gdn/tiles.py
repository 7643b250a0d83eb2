"""Pieces of prepare.py, and what the other GDN kernels share with it.

A tile of rows times K is held in three axes, K cut into NC chunks of KC. Triton spreads the last axis over the lanes of
a warp and gives the lanes left over to one of the other two: they belong to the rows, not to the chunks, so that most
of a sum over K stays inside a thread (three shuffles for a row at KC = 32, where a [rows, 128] tile takes five, and a
quarter of the rows per lane). Which axis Triton picks depends on its version, hence ROW_AXIS.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ties between axes: Triton 3.6 takes the first axis before the second, 3.8 the second before the first. A matter of
# speed alone; tests/bench/compile_report.py shows it in the count of shuffles.
ROW_AXIS = tl.constexpr(0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 1)


def may_fuse(dim_k: int) -> bool:
    """Whether the compiler may contract a product and a sum over K into one rounding.

    With one element of K a lane it would: each lane adds its own product, unrounded, to its neighbour's rounded one, so
    lanes that should hold one sum hold sums a unit in the last place apart (racecheck sees both being stored).
    """
    return dim_k > 32


@triton.jit
def per_k(x):
    """x [NC, KC] as a tile of one row."""
    return tl.expand_dims(x, ROW_AXIS)


@triton.jit
def per_row(x):
    """x [rows] as a tile of one K."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1 - ROW_AXIS)


@triton.jit
def sum_over_k(x):
    """[rows] of a tile."""
    if ROW_AXIS == 0:
        # one axis: a lane adds each product to its sum as it is made, in one instruction (3.8 would go through shared
        # memory to have it)
        return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]]), 1)
    else:
        return tl.sum(tl.sum(x, 0), 1)


# floats kept for each token
FACTORS = tl.constexpr(3)


@triton.jit
def one_over_root(square):
    """1 / sqrt(square) in float32: a Newton step on the approximate root, within a unit in the last place."""
    root = tl.rsqrt(square)
    return root + (0.5 * root) * (1.0 - (square * root) * root)


@triton.jit
def store_token_factors(to, decay, rnorm, beta, live):
    """decay = e^g, rnorm = 1 / |k| and beta / |k| of tokens to to[tokens] + 0..2."""
    tl.store(to, decay, mask=live)
    tl.store(to + 1, rnorm, mask=live)
    tl.store(to + 2, beta * rnorm, mask=live)


@triton.jit
def split(x):
    """x float32 as the sum of two bf16: 16 bits of mantissa, the upper half by cutting off bits.

    Neither half is then needed in both types, so the compiler converts in pairs: rounding the upper half took a
    quarter-rate instruction an element, and most of a verify's time that was not memory's.
    """
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)
