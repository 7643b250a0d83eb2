"""Pieces of the GDN kernels, shared by prepare.py, verify_replay.py and fold.py.

A tile of rows times K is held in three axes, K cut into NC chunks of KC. Triton spreads the last axis over the lanes of
a warp and gives the lanes left over to one of the other two: they belong to the rows, not to the chunks, so that most
of a sum over K stays inside a thread (three shuffles for a row at KC = 32, where a [rows, 128] tile takes five, and a
quarter of the rows per lane). Which axis Triton picks depends on its version, hence ROW_AXIS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.elementary import exp_rn

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
    return tl.sum(tl.sum(x, 1 - ROW_AXIS), 1)


@triton.jit
def k_by_rows(x):
    """A tile as a matrix [NC * KC, rows]."""
    if ROW_AXIS == 1:
        x = tl.permute(x, (1, 0, 2))
    return tl.trans(tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]]))


# tokens whose factors are made at once, and floats kept for each
FACTOR_ROWS = tl.constexpr(16)
FACTORS = tl.constexpr(3)


@triton.jit
def store_factors(to, keys, g, beta, live):
    """e^g, 1 / |k| and beta / |k| of tokens to to[tokens] + 0..2: keys [tokens, K] float32, g and beta [tokens]."""
    square = tl.sum(keys * keys, 1) + 1e-6
    # a Newton step on the approximate root: within a unit in the last place
    rnorm = tl.rsqrt(square)
    rnorm = rnorm + (0.5 * rnorm) * (1.0 - (square * rnorm) * rnorm)
    tl.store(to, exp_rn(g), mask=live)
    tl.store(to + 1, rnorm, mask=live)
    tl.store(to + 2, beta * rnorm, mask=live)


@triton.jit
def make_factors(
    factors, count, order, window_k, window_g, window_beta, stride_k, stride_gate, K: tl.constexpr, KP: tl.constexpr
):
    """store_factors of the first `count` entries of `order`, to factors [count, 3]. A barrier before they are read!"""
    offs_k = tl.arange(0, KP)
    for start in range(0, count, FACTOR_ROWS):
        token = start + tl.arange(0, FACTOR_ROWS)
        live = token < count
        at = tl.load(order + token, mask=live, other=0).to(tl.int64)
        keys = tl.load(
            window_k + at[:, None] * stride_k + offs_k[None, :], mask=live[:, None] & (offs_k < K)[None, :], other=0
        )
        g = tl.load(window_g + at * stride_gate, mask=live, other=0)
        beta = tl.load(window_beta + at * stride_gate, mask=live, other=0)
        store_factors(factors + token * FACTORS, keys.to(tl.float32), g, beta, live)


@triton.jit
def fold_tile(
    state, count, order, window_k, window_v, factors, stride_k, stride_v, offs_k, mask_k, offs_v, mask_v,
):  # fmt: skip
    """The recurrence over the first `count` >= 1 entries of `order`, in order, in float32: a tile of state.

    Keys stay as stored, exact in float32, and their norms act on the row sums: no element is rounded or divided to
    normalise it. Window pointers stand at the row and head; strides are between window positions; factors from
    make_factors, which has brought the keys near: they are loaded one token ahead, values two, positions three.
    """
    last = count - 1
    at = tl.load(order).to(tl.int64)
    at_next = tl.load(order + tl.minimum(1, last)).to(tl.int64)
    at_far = tl.load(order + tl.minimum(2, last)).to(tl.int64)
    raw_k = tl.load(window_k + at * stride_k + offs_k, mask=mask_k, other=0)
    raw_v = tl.load(window_v + at * stride_v + offs_v, mask=mask_v, other=0)
    next_v = tl.load(window_v + at_next * stride_v + offs_v, mask=mask_v, other=0)
    decay, rnorm, strength = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    for t in range(count):
        k = raw_k.to(tl.float32)
        v = raw_v.to(tl.float32)
        decay_now, rnorm_now, strength_now = decay, rnorm, strength
        raw_v = next_v
        raw_k = tl.load(window_k + at_next * stride_k + offs_k, mask=mask_k, other=0)
        next_v = tl.load(window_v + at_far * stride_v + offs_v, mask=mask_v, other=0)
        ahead = factors + tl.minimum(t + 1, last) * FACTORS
        decay, rnorm, strength = tl.load(ahead), tl.load(ahead + 1), tl.load(ahead + 2)
        at_next = at_far
        at_far = tl.load(order + tl.minimum(t + 3, last)).to(tl.int64)

        state = state * decay_now
        delta = strength_now * (v - rnorm_now * sum_over_k(state * per_k(k)))
        state = state + per_row(delta) * per_k(k)
    return state


@triton.jit
def split(x):
    """x float32 as the sum of two bf16: 16 bits of mantissa, the upper half by cutting off bits.

    Neither half is then needed in both types, so the compiler converts in pairs: rounding the upper half took a
    quarter-rate instruction an element, and most of a verify's time that was not memory's.
    """
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def halves(x):
    """split, of x in any floating type; bf16 is its own upper half, and its lower one stands in for zeros."""
    if x.dtype == tl.bfloat16:
        return x, x
    else:
        return split(x.to(tl.float32))


@triton.jit
def dot_split(left_high, left_low, right_high, right_low, acc, RIGHT_EXACT: tl.constexpr):
    """acc + (left_high + left_low) @ (right_high + right_low) on bf16 tensor cores, accumulated in float32.

    RIGHT_EXACT: right_low is taken for zeros. What is dropped, low times low, lies at 2^-16 of the result: a bf16
    output keeps 2^-9.
    """
    acc = tl.dot(left_low, right_high, acc)
    acc = tl.dot(left_high, right_high, acc)
    if not RIGHT_EXACT:
        acc = tl.dot(left_high, right_low, acc)
    return acc
