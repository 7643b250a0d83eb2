"""First half of a GDN verify: carry the queries back over the window; append the nodes' gates to it.

With token t's decay a_t = e^{g_t}, strength beta_t and normalised key k_t, a head's state [V, K] goes
    S_t = a_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_i = scale S_i q_i.
Read from the right this moves the *query*: from x = scale q_i, along node i's path from the node to the oldest pending
token, y_it = beta_t (k_t . x) and x <- a_t (x - y_it k_t), and then
    o_i = S0 x_i + sum_t y_it v_t.
It is the triangular system of the chunked form (UT / WY transform, arXiv 2406.06484) solved by substitution: nothing is
inverted, products of decays only shrink, and a tree differs from a chain in the nodes that a token acts on (ancestor
bits). The decay is kept apart, x = d x^, so that the tile never sees it: d <- a_t d, y_it = d beta_t (k_t . x^). Tokens
go in small groups (_carry_back): a program waits for its own sums more than for anything else.

One program does one (row, value head) and touches no state: [N, K] floats in place of [V, K]. Of a row that folds,
queries are carried back over its nodes and what stays pending: S0 is then the folded state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.ask import ask, line_starts
from ..common.dependent import wait_then_let_go
from ..common.elementary import exp_rn, softplus_rn
from ..common.pending import pending_and_folding
from .fold_tile import STEP_FLOATS, TOKENS, key_products, step_factors, step_tokens, store_factors
from .tiles import FACTORS, one_over_root, per_k, per_row, split, store_token_factors, sum_over_k


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
            products = key_products(k_head, stride_k, oldest, live, K, PARTS, PART, NATIVE)
            made = step_factors(products, g_head, beta_head, stride, oldest, live)
            store_factors(to, made)
    else:
        for start in tl.range(0, folding, TOKENS, num_stages=1):
            at, live = step_tokens(start, folding, order_row)
            products = key_products(k_head, stride_k, at, live, K, PARTS, PART, NATIVE)
            made = step_factors(products, g_head, beta_head, stride, at, live)
            store_factors(to + start // TOKENS * STEP_FLOATS, made)


@triton.jit
def _load_group(keys_at, factors_at, newest, first, count, GROUP: tl.constexpr):
    """(keys, factors) of tokens newest, newest - 1, .., GROUP of them: tuples of raw keys [NC, KC] and of what
    tiles.store_token_factors keeps. Tokens that are not among the `count` ones have zeros, and a decay of 1.

    Token t is entry first + t of the row's order.
    """
    k_head, stride_k, offs, mask = keys_at
    factors_head, stride_factors, order_row = factors_at
    keys = ()
    factors = ()
    for back in tl.static_range(GROUP):
        t = newest - back
        there = (t >= 0) & (t < count)
        position = tl.load(order_row + first + t, mask=there, other=0).to(tl.int64)
        keys = keys + (tl.load(k_head + position * stride_k + offs, mask=mask & there, other=0),)  # noqa: RUF005 (jit: no unpacking)
        at = factors_head + position * stride_factors
        decay = tl.load(at, mask=there, other=1.0)
        rnorm = tl.load(at + 1, mask=there, other=0.0)
        strength = tl.load(at + 2, mask=there, other=0.0)
        factors = factors + ((decay, rnorm, strength),)  # noqa: RUF005
    return keys, factors


@triton.jit
def _carry_back(x, decayed, keys, factors, on_path):
    """x^ [rows, NC, KC] and d [rows] after a group of tokens, the newest first; and d y [rows] of each token.

    The products of x^ with all the group's keys are taken at once, before any token has changed it: what a newer token
    takes from x^ takes its y / |k| times the product of both keys from an older token's. So a group is a chain of sums
    no longer than one token's. on_path: the rows that each token acts on.
    """
    GROUP: tl.constexpr = len(keys)
    wide = ()
    products = ()
    for i in tl.static_range(GROUP):
        wide = wide + (keys[i].to(tl.float32),)  # noqa: RUF005 (jit: no unpacking)
        products = products + (sum_over_k(x * per_k(wide[i])),)  # noqa: RUF005
    ys = ()
    given = ()
    for i in tl.static_range(GROUP):
        decay, _, strength = factors[i]
        product = products[i]
        for newer in tl.static_range(i):
            both = sum_over_k(tl.broadcast_to(per_k(wide[newer] * wide[i]), x.shape))
            product = tl.fma(ys[newer] * factors[newer][1], -both, product)
        y = tl.where(on_path[i], product * strength, 0.0)
        ys = ys + (y,)  # noqa: RUF005
        given = given + (y * decayed,)  # noqa: RUF005
        # after y: a token's own decay acts on what came before it
        decayed = tl.where(on_path[i], decayed * decay, decayed)
    for i in tl.static_range(GROUP):
        x = x - per_row(ys[i] * factors[i][1]) * per_k(wide[i])
    return x, decayed, given


@triton.jit
def prepare_kernel(
    q, a, b, A_log, dt_bias, scale, slots, rows, pending, newest, order,
    window_k, window_g, window_beta, window_factors, ancestors, carried, weights, fold_factors,
    fold_threshold, fold_at_once, capacity,
    stride_q, stride_a, stride_b, stride_ancestors, stride_wk_row, stride_wk, stride_gate_row, stride_gate,
    stride_factors_row, stride_factors,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr, KC: tl.constexpr, GROUP: tl.constexpr,
    FOLD_STEPS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """x to carried [B, HV, N, K] and y to weights [B, HV, BT, N] (token t in row t), float32; padding rows stay.

    SPLIT: carried is bf16 [2, B, HV, N, K], high halves then low ones. Of rows that fold, what fold_tile.py makes of
    the folded tokens' keys and gates goes to fold_factors [B, HV, FOLD_STEPS, STEP_FLOATS]. APART: by programs of their
    own, as many again along the second axis, which start last, find most rows waiting, and end first.

    OVERLAP: verify starts while this runs; and until the convolution has ended, where this was launched to start while
    that runs, it looks up what was there before. Verify is let go after that: sooner made small drafts' steps longer.
    """
    batch_row = (tl.program_id(0) // HV).to(tl.int64)
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    token0 = batch_row * N
    slot = tl.load(slots + batch_row).to(tl.int64)
    row = tl.load(rows + batch_row).to(tl.int64)
    # (no row is negative: asked, so that both loads are on their way at once)
    if (slot <= 0) | (row < 0):
        if OVERLAP:
            # whoever waits for this kernel waits for the convolution too
            tl.extra.cuda.gdc_wait()
        return
    order += row * capacity
    # loaded while it is not known yet whether the row folds; and what follows finds the order in the cache
    oldest = tl.arange(0, TOKENS)
    positions = tl.load(order + oldest, mask=oldest < capacity, other=0).to(tl.int64)
    before, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
    kept = before - folding
    window_k += row * stride_wk_row + h * K
    window_g += row * stride_gate_row + hv
    window_beta += row * stride_gate_row + hv
    window_factors += row * stride_factors_row + hv * FACTORS
    q += token0 * stride_q + h * K
    carried += tl.program_id(0).to(tl.int64) * (N * K)
    weights += tl.program_id(0).to(tl.int64) * (N * BT)
    fold_factors += tl.program_id(0).to(tl.int64) * (FOLD_STEPS * STEP_FLOATS)

    # whatever becomes of these tokens, their keys are read
    lines = line_starts(window_k.dtype.element_ty, NC * KC, K)
    ask(window_k + positions[:, None] * stride_wk + lines[None, :], NATIVE)
    ask(window_factors + positions * stride_factors, NATIVE)

    node = tl.arange(0, BN)
    is_node = node < N
    position = tl.load(order + before + node, mask=is_node, other=0).to(tl.int64)
    bits = tl.load(ancestors + batch_row * stride_ancestors + node, mask=is_node, other=0)
    if N <= 32:
        bits = bits.to(tl.int32)
    wait_then_let_go(OVERLAP)

    windows = (window_k, window_g, window_beta, stride_wk, stride_gate)
    if APART:
        if tl.program_id(1) == 1:
            _make_factors(windows, folding, order, positions, fold_factors, K, PARTS, PART, NATIVE, FOLD_STEPS)
            return
    else:
        _make_factors(windows, folding, order, positions, fold_factors, K, PARTS, PART, NATIVE, FOLD_STEPS)

    offs = tl.arange(0, NC)[:, None] * KC + tl.arange(0, KC)[None, :]
    mask = offs < K
    mask_tile = per_row(is_node) & per_k(mask)
    x = tl.load(q + per_row(node) * stride_q + per_k(offs), mask=mask_tile, other=0).to(tl.float32)

    # append gates, and what is made of them and of the keys
    flat = tl.arange(0, NC * KC)
    mask_keys = is_node[:, None] & (flat < K)[None, :]
    keys = tl.load(window_k + position[:, None] * stride_wk + flat[None, :], mask=mask_keys, other=0)
    raw_a = tl.load(a + (token0 + node) * stride_a + hv, mask=is_node, other=0)
    raw_b = tl.load(b + (token0 + node) * stride_b + hv, mask=is_node, other=0)
    g, beta = gates(raw_a, raw_b, tl.load(A_log + hv), tl.load(dt_bias + hv))
    tl.store(window_g + position * stride_gate, g, mask=is_node)
    tl.store(window_beta + position * stride_gate, beta, mask=is_node)
    wide = keys.to(tl.float32)
    rnorm = one_over_root(tl.sum(wide * wide, 1) + 1e-6)
    store_token_factors(window_factors + position * stride_factors, exp_rn(g), rnorm, beta, is_node)
    # the loop reads them back
    tl.debug_barrier()

    NODES: tl.constexpr = GROUP if GROUP < BN else BN
    x = x * per_row(scale / tl.sqrt(sum_over_k(x * x) + 1e-6))
    decayed = tl.full([BN], 1.0, dtype=tl.float32)
    factors_of = (window_factors, stride_factors, order)
    # the newest pending tokens, loaded while nodes are worked on; then each group while the one before it is
    held = (window_k, stride_wk, offs, mask)
    waiting = _load_group(held, factors_of, kept - 1, folding, kept, GROUP)
    GROUPS: tl.constexpr = (N + NODES - 1) // NODES
    for group in range(GROUPS):
        newest_node = (GROUPS - group) * NODES - 1  # (counted from the root on: a longer tree changes no bits)
        node_keys, factors = _load_group(held, factors_of, newest_node, before, N, NODES)
        on_path = ()
        for back in tl.static_range(NODES):
            j = newest_node - back
            on_path = on_path + ((node == j) | (((bits >> j) & 1) != 0),)  # noqa: RUF005 (jit: no unpacking)
        x, decayed, ys = _carry_back(x, decayed, node_keys, factors, on_path)
        for back in tl.static_range(NODES):
            j = newest_node - back
            tl.store(weights + (kept + j) * N + node, ys[back], mask=is_node & (j < N))
    # the tokens that stay pending: every node comes after them
    for group in tl.range(0, (kept + GROUP - 1) // GROUP, num_stages=1):
        newest_token = kept - 1 - group * GROUP
        token_keys, factors = waiting
        waiting = _load_group(held, factors_of, newest_token - GROUP, folding, kept, GROUP)
        on_path = ()
        for _ in tl.static_range(GROUP):
            on_path = on_path + (is_node,)  # noqa: RUF005
        x, decayed, ys = _carry_back(x, decayed, token_keys, factors, on_path)
        for back in tl.static_range(GROUP):
            t = newest_token - back
            tl.store(weights + t * N + node, ys[back], mask=is_node & (t >= 0))
    x = x * per_row(decayed)
    p_x = carried + per_row(node) * K + per_k(offs)
    if SPLIT:
        high, low = split(x)
        tl.store(p_x, high, mask=mask_tile)
        tl.store(p_x + tl.num_programs(0).to(tl.int64) * (N * K), low, mask=mask_tile)
    else:
        tl.store(p_x, x, mask=mask_tile)
