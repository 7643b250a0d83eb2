"""The exact fold of pending tokens as products, as a verify and fold.py do it (jit helpers only).

Of tokens t = 0 .. P - 1 in order, with log decay g, strength beta, raw key k of norm 1 / r, and G_t the sum of g
after t,

    S_P = D S0 + sum_t w_t k_t^T,     D = e^{sum of g},     w = R X^T
    R_t = beta_t e^{G_t} v_t - beta_t r_t D (S0 k_t)
    X (I + B L) = diag(r),     B = diag(beta),     L_ts = r_t r_s k_t . k_s for s < t, else 0

No decay stands inside the triangular system: those of a path cancel but for its two ends, and are at most 1. X is small
and made once a head; every tile of the state takes two products with the keys and one with X.

Keys are taken as they lie: 16-bit ones are exact on tensor cores, and what stands beside them goes in addends
(common/fragments.py), as many as hold all of it: three of float32. The sums of g are float64, those of squares from
eight on. The state is rounded once a fold (plain decode rounds it twice a token): `tl.fma(S0, D, sum)`. It must not be
the products' accumulator, which is cut short in every step. All the rest that is summed is fused by hand, so that
whoever folds gets the same bits.

Tokens go TOKENS at a time, the oldest first, each such step a fold of its own on a state still in float32. What lies
beyond the pending tokens adds zeros: windows of different sizes give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.elementary import exp_of_sum, exp_rn
from ..common.fragments import (
    addends,
    as_left,
    as_tile,
    in_product_order,
    inside,
    load_in_product_order,
    multiply,
    state_addends,
)
from ..common.operands import FOLD_TOKENS

TOKENS = tl.constexpr(FOLD_TOKENS)
STEP_FLOATS = tl.constexpr(320)  # the factors of a step, in a whole number of 128 bytes


@triton.jit
def step_tokens(start, count, order_row):
    """Of the pending tokens start .. start + TOKENS: window positions, and which are there."""
    token = start + tl.arange(0, TOKENS)
    live = token < count
    return tl.load(order_row + token, mask=live, other=0).to(tl.int64), live


@triton.jit
def step_keys(
    k_head, stride, position, live,
    K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tokens' keys, PARTS times [TOKENS, PART], columns renamed."""
    keys = ()
    for part in tl.static_range(PARTS):
        at = (position, live, part * PART)
        keys = keys + (load_in_product_order(k_head, stride, at, K, PART, CHUNK),)  # noqa: RUF005 (jit has no unpacking)
    return keys


@triton.jit
def _one_over_root(square):
    """1 / sqrt of float64 in float32, to half a unit in the last place: its error is one of all that a token adds."""
    root = tl.rsqrt(square.to(tl.float32))
    wide = root.to(tl.float64)
    return tl.fma(0.5 * root, (1.0 - square * wide * wide).to(tl.float32), root)


@triton.jit
def _squares_of_eight(keys):
    """[TOKENS, columns // 8]: sums of eight squares of a token, float64.

    Named sum by sum, so that every layout gives the same bits. Their float32 roundings are those of few small sums, a
    tenth of the one that the root is rounded to; and eight conversions to float64, which are slow, become one.
    """
    GROUPS: tl.constexpr = keys.shape[1] // 8
    left, right = tl.split(tl.reshape(keys.to(tl.float32), [TOKENS, GROUPS * 4, 2]))
    square = tl.fma(left, left, right * right)
    left, right = tl.split(tl.reshape(square, [TOKENS, GROUPS * 2, 2]))
    left, right = tl.split(tl.reshape(left + right, [TOKENS, GROUPS, 2]))
    return (left + right).to(tl.float64)


@triton.jit
def _row(x, index):
    """A row of x float32, [1, columns]. As integers: their zeros are no work to the compiler, which knows the index."""
    bits = tl.where(tl.arange(0, x.shape[0])[:, None] == index, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _column(x, index):
    """A column of x, [rows, 1], by shuffles: what is made of it stays in the layout they take, a row over 16 lanes."""
    return tl.gather(x, tl.full([x.shape[0], 1], index, tl.int32), axis=1)


@triton.jit
def _inverse(coupling):
    """(I - coupling)^-1 of a strict lower triangle [TOKENS, TOKENS]: row after row is done, and added to those below.

    In two halves: the first is done when the last begins.
    """
    HALF: tl.constexpr = TOKENS // 2
    upper, lower = tl.split(tl.permute(tl.reshape(coupling, [2, HALF, TOKENS]), (1, 2, 0)))
    t = tl.arange(0, HALF)[:, None]
    column = tl.arange(0, TOKENS)[None, :]
    first, last = tl.where(t == column, 1.0, 0.0), tl.where(t + HALF == column, 1.0, 0.0)
    for done in tl.static_range(HALF):
        its_row = _row(first, done)
        if done < HALF - 1:
            first = tl.fma(_column(upper, done), its_row, first)
        last = tl.fma(_column(lower, done), its_row, last)
    for done in tl.static_range(HALF - 1):
        last = tl.fma(_column(lower, HALF + done), _row(last, done), last)
    return tl.reshape(tl.permute(tl.join(first, last), (2, 0, 1)), [TOKENS, TOKENS])


@triton.jit
def key_products(
    k_head, stride_k, position, live,
    K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What a fold of these tokens takes of their keys: products of two [TOKENS, TOKENS] and r [TOKENS], zero where no
    token is. Keys are loaded here once more, in pieces that lie in registers as tensor cores want them, both factors
    alike."""
    PIECE: tl.constexpr = PART if PART < 32 else 32
    CHUNK: tl.constexpr = 32 if PIECE == 32 and k_head.dtype.element_ty.primitive_bitwidth == 16 else 16
    gram = tl.zeros([TOKENS, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, PIECE // 8], tl.float64)
    for part in tl.range(PARTS, num_stages=1):
        for piece in tl.static_range(PART // PIECE):
            column = part * PART + piece * PIECE + tl.arange(0, PIECE)
            keys = tl.load(
                k_head + position[:, None] * stride_k + column[None, :],
                mask=live[:, None] & inside(column, K, K % PART == 0)[None, :],
                other=0.0,
            )
            squares += _squares_of_eight(keys)
            keys = in_product_order(keys, CHUNK)
            gram = tl.fma(multiply((keys,), (tl.trans(keys),), NATIVE), 1.0, gram)
    norm = tl.where(live, _one_over_root(tl.sum(squares, axis=1) + 1e-6), 0.0)
    return gram, norm


@triton.jit
def step_factors(products, g_head, beta_head, stride, position, live):
    """What one fold of these tokens is made of but for state and values: (of v, of S0 k, r, X^T off its diagonal, D).

    products: of key_products. The first three are [TOKENS] float32, zero where no token is; X^T is [TOKENS, TOKENS].
    """
    gram, norm = products
    g = tl.load(g_head + position * stride, mask=live, other=0.0).to(tl.float64)
    beta = tl.load(beta_head + position * stride, mask=live, other=0.0)
    total = tl.sum(g, axis=0)
    kept = exp_of_sum(total)
    of_value = beta * exp_rn((total - tl.cumsum(g, axis=0)).to(tl.float32))
    t = tl.arange(0, TOKENS)
    row, column = t[:, None], t[None, :]
    coupling = (gram * (norm[:, None] * norm[None, :])) * -beta[:, None]
    inverse = _inverse(tl.where(row > column, coupling, 0.0))
    solve = tl.where(row > column, norm[:, None] * inverse, 0.0)
    return of_value, -(beta * norm) * kept, norm, tl.trans(solve), kept


@triton.jit
def _factor_pointers(at):
    """Where STEP_FLOATS floats hold the factors, in the order of step_factors."""
    t = tl.arange(0, TOKENS)
    rows = at + t
    square = at + 3 * TOKENS + t[:, None] * TOKENS + t[None, :]
    return rows, rows + TOKENS, rows + 2 * TOKENS, square, at + 3 * TOKENS + TOKENS * TOKENS


@triton.jit
def store_factors(at, factors):
    """Keep what step_factors made."""
    pointers = _factor_pointers(at)
    for i in tl.static_range(len(factors)):
        tl.store(pointers[i], factors[i])


@triton.jit
def in_addends(factors):
    """What step_factors made, as fold_step takes it: X^T in three addends, cut once however many blocks follow."""
    of_value, of_product, norm, solve, kept = factors
    return of_value, of_product, norm, addends(solve, tl.bfloat16, 3), kept


@triton.jit
def load_factors(at):
    """What store_factors kept, in_addends."""
    of_value, of_product, norm, solve, kept = _factor_pointers(at)
    return in_addends((tl.load(of_value), tl.load(of_product), tl.load(norm), tl.load(solve), tl.load(kept)))


@triton.jit
def fold_step(
    tiles, values, keys, factors,
    CHUNK: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Some rows of a state after these tokens, float32: tiles of PART columns each, a tuple as the keys are, in float32
    or as the state lies.

    values [rows, TOKENS], zero where no token is; factors by load_factors or in_addends.
    """
    of_value, of_product, norm, solve, kept = factors
    PARTNER: tl.constexpr = keys[0].dtype
    product = tl.zeros([values.shape[0], TOKENS], tl.float32)
    for part in tl.static_range(len(keys)):
        # a float16 state beside such keys would be summed in another order than its float32 form is
        tile = tiles[part] if tiles[part].dtype == tl.bfloat16 else tiles[part].to(tl.float32)
        left = state_addends(as_left(tile, WARPS), PARTNER, 3)
        # a plain sum would become the product's accumulator
        product = tl.fma(multiply(left, (tl.trans(keys[part]),), NATIVE), 1.0, product)
    given = tl.fma(product, of_product[None, :], values.to(tl.float32) * of_value[None, :])
    # the diagonal in float32's own rounding
    coupled = multiply(addends(given, tl.bfloat16, 3), solve, NATIVE)
    weight = tl.fma(given, norm[None, :], coupled)
    weights = addends(weight, PARTNER, 3)
    folded = ()
    for part in tl.static_range(len(keys)):
        added = as_tile(multiply(weights, (keys[part],), NATIVE), CHUNK, WARPS)
        folded = folded + (tl.fma(tiles[part].to(tl.float32), kept, added),)  # noqa: RUF005
    return folded
