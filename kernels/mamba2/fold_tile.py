"""The exact fold of pending tokens as a product, as a verify and fold.py do it (jit helpers only).

Of tokens t = 0 .. P - 1 in order, with g = A dt,

    S_P = e^{sum of g} S0 + sum_t (dt_t e^{sum of g after t} x_t) B_t^T

The first factor of the sum is float32, made of x in three addends; B is taken as it is. The sums of g are float64, so
they lose nothing, and the state is rounded once a fold (plain decode rounds it once a token): `tl.fma(S0, kept, sum)`.
It must not be the product's accumulator, which is cut short in every step of a product.

Tokens go TOKENS at a time, the oldest first. Windows of different sizes then give the same bits: what lies beyond the
pending tokens adds zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.elementary import exp_of_sum, exp_rn
from ..common.fragments import addends
from ..common.operands import FOLD_TOKENS

TOKENS = tl.constexpr(FOLD_TOKENS)


@triton.jit
def pending_places(start, count, order_row):
    """Of the pending tokens start .. start + TOKENS: window positions, and which are there."""
    token = start + tl.arange(0, TOKENS)
    live = token < count
    return tl.load(order_row + token, mask=live, other=0), live


@triton.jit
def pending_steps(position, live, dt_head, stride_dt, decay_rate):
    """dt of these tokens, and g in float64."""
    dt = tl.load(dt_head + position * stride_dt, mask=live, other=0.0)
    return dt, decay_rate.to(tl.float64) * dt.to(tl.float64)


@triton.jit
def weights(dt, g, passed, total):
    """[TOKENS] float32: dt_t e^{sum of g after t}. passed: the sum of g before these tokens, total: over all."""
    return dt * exp_rn((total - (passed + tl.cumsum(g, axis=0))).to(tl.float32))


@triton.jit
def weighted(x, weight, PARTNER: tl.constexpr):
    """x [rows, TOKENS] times the tokens' weights, in addends. (A fused product, which nothing after it can absorb.)"""
    x = x.to(tl.float32)
    return addends(tl.fma(x, weight[None, :], 0.0), PARTNER, 3)


@triton.jit
def fold_places(count, order_row, STEPS: tl.constexpr):
    """Of up to STEPS x TOKENS pending tokens: positions and which are there, a tuple each."""
    positions = ()
    lives = ()
    for step in tl.static_range(STEPS):
        position, live = pending_places(step * TOKENS, count, order_row)
        positions = positions + (position,)  # noqa: RUF005 (jit code has no unpacking)
        lives = lives + (live,)  # noqa: RUF005
    return positions, lives


@triton.jit
def fold_factors(positions, lives, dt_head, stride_dt, decay_rate):
    """The weights of these tokens, a tuple, and e^{sum of g}.

    Sums in the order of fold.py's loops, which make the same numbers of any count.
    """
    total = tl.full((), 0.0, tl.float64)
    steps = ()
    for step in tl.static_range(len(positions)):
        dt, g = pending_steps(positions[step], lives[step], dt_head, stride_dt, decay_rate)
        steps = steps + ((dt, g),)  # noqa: RUF005
        total += tl.sum(g, axis=0)
    passed = tl.full((), 0.0, tl.float64)
    shares = ()
    for step in tl.static_range(len(positions)):
        dt, g = steps[step]
        shares = shares + (weights(dt, g, passed, total),)  # noqa: RUF005
        passed += tl.sum(g, axis=0)
    return shares, exp_of_sum(total)
