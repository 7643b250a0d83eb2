"""Exponential, logarithm and softplus in float32 nearly as exact as float32 can be (jit helpers only).

The compiler's own are faster and up to four units in the last place off. A decay near 1 multiplies every later token:
its error is what a chain of thousands of commits is made of.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_rn(x):
    """e^x in float32 to within a unit in the last place, x <= 88; 0 where it would be subnormal."""
    x = tl.maximum(x, -87.5)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    # Taylor on [-0.347, 0.347], the 1 added last
    p = 1.0 / 5040 * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = (p * r) * r + r
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x > -87.4, power + power * p, 0.0)


@triton.jit
def exp_of_sum(total):
    """e^total in float32, total float64: what float32 does not hold of it is not lost."""
    high = total.to(tl.float32)
    share = exp_rn(high)
    return tl.fma(share, (total - high.to(tl.float64)).to(tl.float32), share)


@triton.jit
def log1p_rn(y):
    """log(1 + y) in float32 to within two units in the last place, 0 <= y < 2^100."""
    u = 1.0 + y
    # u = 2^n m with m in [1/sqrt(2), sqrt(2)); while n = 0, m - 1 is y itself and nothing has been rounded away
    n = ((u.to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23).to(tl.float32)
    scale = ((127 - n.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
    f = tl.where(n == 0.0, y, u * scale - 1.0)
    z = f / (2.0 + f)
    w = z * z
    p = 1.0 / 11 * w + 1.0 / 9
    p = p * w + 1.0 / 7
    p = p * w + 0.2
    p = p * w + 1.0 / 3
    # log m = 2 atanh z = f - z (f - 2 w p)
    return n * 0.693359375 + ((f - z * (f - 2.0 * w * p)) - n * 2.12194440e-4)


@triton.jit
def softplus_rn(x):
    """log(1 + e^x), and x itself past SGLang's threshold of 20."""
    return tl.where(x <= 20.0, log1p_rn(exp_rn(tl.minimum(x, 20.0))), x)
