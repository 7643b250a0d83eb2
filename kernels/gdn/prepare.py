"""First half of a GDN verify: carry the queries back over the window; append the nodes' keys and gates to it.

With token t's decay a_t = e^{g_t}, strength beta_t and normalised key k_t, a head's state [V, K] goes
    S_t = a_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_i = scale S_i q_i.
Read from the right this moves the *query*: from x = scale q_i, along node i's path from the node to the oldest pending
token, y_it = beta_t (k_t . x) and x <- a_t (x - y_it k_t), and then
    o_i = S0 x_i + sum_t y_it v_t.
It is the triangular system of the chunked form (UT / WY transform, arXiv 2406.06484) solved by substitution: nothing is
inverted, products of decays only shrink, and a tree differs from a chain in the nodes that a token acts on (ancestor
bits). The decay is kept apart, x = d x^, so that the tile never sees it: d <- a_t d, y_it = d beta_t (k_t . x^).

One program does one (row, value head) and touches no state: [N, K] floats in place of [V, K]. Of a row that folds,
queries are carried back over its nodes and what stays pending: S0 is then the folded state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.elementary import exp_rn, softplus_rn
from ..common.pending import pending_and_folding
from .fold_tile import STEP_FLOATS, TOKENS, step_factors, step_tokens, store_factors
from .tiles import FACTORS, per_k, per_row, split, store_token_factors, sum_over_k


@triton.jit
def gates(a, b, A_log, dt_bias):
    """Log decay g and write strength beta from the raw gate inputs: SGLang's formulas (softplus threshold 20).

    Its arithmetic takes the approximate exponential and logarithm; these two go into every later state, hence *_rn.
    """
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return -exp_rn(A_log.to(tl.float32)) * softplus_rn(x), 1.0 / (1.0 + exp_rn(tl.minimum(-b.to(tl.float32), 80.0)))


@triton.jit
def _make_factors(
    windows, folding, order_row, oldest, to,
    K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, NATIVE: tl.constexpr, FOLD_STEPS: tl.constexpr,
):  # fmt: skip
    """What a verify needs to fold the oldest `folding` tokens, whose positions begin with `oldest`.

    windows: of a head's keys, g and beta, and two strides.
    """
    k_head, g_head, beta_head, stride_k, stride = windows
    if FOLD_STEPS == 1:
        if folding > 0:
            live = tl.arange(0, TOKENS) < folding
            made = step_factors(k_head, g_head, beta_head, stride_k, stride, oldest, live, K, PARTS, PART, NATIVE)
            store_factors(to, made)
    else:
        for start in tl.range(0, folding, TOKENS, num_stages=1):
            at, live = step_tokens(start, folding, order_row)
            made = step_factors(k_head, g_head, beta_head, stride_k, stride, at, live, K, PARTS, PART, NATIVE)
            store_factors(to + start // TOKENS * STEP_FLOATS, made)


@triton.jit
def prepare_kernel(
    q, k, a, b, A_log, dt_bias, scale, slots, rows, pending, newest, order,
    window_k, window_g, window_beta, window_factors, ancestors, carried, weights, fold_factors,
    fold_threshold, fold_at_once, capacity,
    stride_q, stride_k, stride_a, stride_b, stride_ancestors, stride_wk_row, stride_wk, stride_gate_row, stride_gate,
    stride_factors_row, stride_factors,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr, KC: tl.constexpr,
    FOLD_STEPS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """x to carried [B, HV, N, K] and y to weights [B, HV, N, BT] (token t in column t), float32; padding rows stay.

    SPLIT: carried is bf16 [2, B, HV, N, K], high halves then low ones. Of rows that fold, what fold_tile.py makes of
    the folded tokens' keys and gates goes to fold_factors [B, HV, FOLD_STEPS, STEP_FLOATS]. APART: by programs of their
    own, as many again along the second axis, which start last, find most rows waiting, and end first.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    batch_row = (tl.program_id(0) // HV).to(tl.int64)
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    token0 = batch_row * N
    slot = tl.load(slots + batch_row).to(tl.int64)
    row = tl.load(rows + batch_row).to(tl.int64)
    # (no row is negative: asked, so that both loads are on their way at once)
    if (slot <= 0) | (row < 0):
        return
    order += row * capacity
    # asked for while it is not known yet whether the row folds; and what follows finds the order in the cache
    oldest = tl.arange(0, TOKENS)
    positions = tl.load(order + oldest, mask=oldest < capacity, other=0).to(tl.int64)
    before, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
    kept = before - folding
    window_k += row * stride_wk_row + h * K
    window_g += row * stride_gate_row + hv
    window_beta += row * stride_gate_row + hv
    window_factors += row * stride_factors_row + hv * FACTORS
    q += token0 * stride_q + h * K
    k += token0 * stride_k + h * K
    carried += tl.program_id(0).to(tl.int64) * (N * K)
    weights += tl.program_id(0).to(tl.int64) * (N * BT)
    fold_factors += tl.program_id(0).to(tl.int64) * (FOLD_STEPS * STEP_FLOATS)

    windows = (window_k, window_g, window_beta, stride_wk, stride_gate)
    if APART:
        if tl.program_id(1) == 1:
            _make_factors(windows, folding, order, positions, fold_factors, K, PARTS, PART, NATIVE, FOLD_STEPS)
            return
    else:
        _make_factors(windows, folding, order, positions, fold_factors, K, PARTS, PART, NATIVE, FOLD_STEPS)

    node = tl.arange(0, BN)
    is_node = node < N
    offs = tl.arange(0, NC)[:, None] * KC + tl.arange(0, KC)[None, :]
    mask = offs < K
    mask_tile = per_row(is_node) & per_k(mask)
    x = tl.load(q + per_row(node) * stride_q + per_k(offs), mask=mask_tile, other=0).to(tl.float32)
    bits = tl.load(ancestors + batch_row * stride_ancestors + node, mask=is_node, other=0)
    if N <= 32:
        bits = bits.to(tl.int32)

    # entry t of the path order: the tokens that stay pending, then nodes
    entries = order + folding

    # append keys (once a group), gates and what is made of both
    position = tl.load(order + before + node, mask=is_node, other=0).to(tl.int64)
    flat = tl.arange(0, NC * KC)
    mask_keys = is_node[:, None] & (flat < K)[None, :]
    keys = tl.load(k + node[:, None] * stride_k + flat[None, :], mask=mask_keys, other=0)
    if hv % (HV // H) == 0:
        tl.store(window_k + position[:, None] * stride_wk + flat[None, :], keys, mask=mask_keys)
    raw_a = tl.load(a + (token0 + node) * stride_a + hv, mask=is_node, other=0)
    raw_b = tl.load(b + (token0 + node) * stride_b + hv, mask=is_node, other=0)
    g, beta = gates(raw_a, raw_b, tl.load(A_log + hv), tl.load(dt_bias + hv))
    tl.store(window_g + position * stride_gate, g, mask=is_node)
    tl.store(window_beta + position * stride_gate, beta, mask=is_node)
    store_token_factors(window_factors + position * stride_factors, keys.to(tl.float32), g, beta, is_node)
    # the loop reads them back
    tl.debug_barrier()

    x = x * per_row(scale / tl.sqrt(sum_over_k(x * x) + 1e-6))
    decayed = tl.full([BN], 1.0, dtype=tl.float32)
    # Loads run one token ahead, positions two: stores stand between.
    total = kept + N
    older = tl.load(entries + total - 2, mask=total > 1, other=0).to(tl.int64)
    raw_k = tl.load(k + (N - 1) * stride_k + offs, mask=mask, other=0)
    p_factor = window_factors + tl.load(entries + total - 1).to(tl.int64) * stride_factors
    next_decay, next_rnorm, next_strength = tl.load(p_factor), tl.load(p_factor + 1), tl.load(p_factor + 2)
    newest = tl.load(entries + kept - 1, mask=kept > 0, other=0).to(tl.int64)
    waiting_k = tl.load(window_k + newest * stride_wk + offs, mask=mask & (kept > 0), other=0)
    # the nodes, by the argument: another program stores their keys to the window
    for step in range(N):
        j = N - 1 - step
        key = raw_k.to(tl.float32)
        decay, rnorm, strength = next_decay, next_rnorm, next_strength
        raw_k = tl.load(k + (j - 1) * stride_k + offs, mask=mask & (j > 0), other=0)
        p_factor = window_factors + older * stride_factors
        next_decay, next_rnorm, next_strength = tl.load(p_factor), tl.load(p_factor + 1), tl.load(p_factor + 2)
        older = tl.load(entries + kept + j - 2, mask=kept + j > 1, other=0).to(tl.int64)

        on = (node == j) | (((bits >> j) & 1) != 0)
        y = tl.where(on, sum_over_k(x * per_k(key)) * strength, 0.0)
        x = x - per_row(y * rnorm) * per_k(key)
        tl.store(weights + node * BT + (kept + j), y * decayed, mask=is_node)
        # after y: a token's own decay acts on what came before it
        decayed = tl.where(on, decayed * decay, decayed)
    # the tokens that stay pending: every node comes after them
    raw_k = waiting_k
    for step in range(kept):
        t = kept - 1 - step
        key = raw_k.to(tl.float32)
        decay, rnorm, strength = next_decay, next_rnorm, next_strength
        raw_k = tl.load(window_k + older * stride_wk + offs, mask=mask & (t > 0), other=0)
        p_factor = window_factors + older * stride_factors
        next_decay, next_rnorm, next_strength = tl.load(p_factor), tl.load(p_factor + 1), tl.load(p_factor + 2)
        older = tl.load(entries + t - 2, mask=t > 1, other=0).to(tl.int64)

        y = sum_over_k(x * per_k(key)) * strength
        x = x - per_row(y * rnorm) * per_k(key)
        tl.store(weights + node * BT + t, y * decayed, mask=is_node)
        decayed = decayed * decay
    x = x * per_row(decayed)
    p_x = carried + per_row(node) * K + per_k(offs)
    if SPLIT:
        high, low = split(x)
        tl.store(p_x, high, mask=mask_tile)
        tl.store(p_x + tl.num_programs(0).to(tl.int64) * (N * K), low, mask=mask_tile)
    else:
        tl.store(p_x, x, mask=mask_tile)
