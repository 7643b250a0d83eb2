"""What prepare.py does for up to 16 nodes, by products on tensor cores: one warp for two value heads of a key head, for
one of drafts of more than eight nodes.

With raw keys k_t, r_t = 1 / |k_t| and s_i = scale / |q_i|, prepare.py's substitution reads
    R_it = s_i q_i . k_t - sum_u z_iu k_u . k_t  (u newer than t, on node i's path),    z_it = beta_t r_t^2 R_it
    y_it = d_it beta_t r_t R_it,    x_i = d_i (s_i q_i - sum_t z_it k_t)
with d_it the product of the decays on the path after t, d_i that of all of it. So what has K columns is products of
16-bit keys and queries, exact on tensor cores, and one more with z in addends; the chain from token to token is left
with numbers. Both heads share all but beta and the decays.

A token's key is in the hands of four lanes, and so is node i's row of R; what a token takes from older ones goes from
lane to lane by shuffles, nothing through shared memory (substitution.py). Up to four nodes the rows of both heads are
one block of eight, up to eight a block a head. More nodes are two blocks of rows; a warp's registers do not hold all
keys then, which are loaded in pieces of 32 columns, for the sums and once more for x. What hangs on pending tokens
alone is asked for while the convolution still runs, and verify is let go at once: before it waits it looks at nothing
that either of them writes.

Programs of their own make what folds need (fold_tile.py), in the order in which verify starts its rows: those that fold
first. So all of them are at work while the others find nothing to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.device import compute_capability
from ..common.elementary import exp_rn
from ..common.lanes import (
    LANES,
    even_of,
    from_lane,
    load,
    load_pairs,
    mma,
    odd_of,
    pair_cut,
    pair_rounded,
    row_and_column,
    store,
    store_pairs,
    turn,
    without_cut,
)
from ..common.operands import FOLD_TOKENS
from ..common.pending import pending_and_folding
from .block_products import BLOCK, add_products, products_of
from .fold_tile import STEP_FLOATS, key_products, step_factors, step_tokens, store_factors
from .prepare import gates
from .substitution import (
    at_columns,
    decays_after,
    left_factors,
    solve,
    two_at_a_time,
)
from .tiles import FACTORS
from .window import GdnWindow


def heads_a_program(nodes: int) -> int:
    """Value heads of a key head that a program of prepare_products_kernel has, or fewer where these are odd."""
    return 2 if nodes <= BLOCK.value else 1


def small_enough(nodes: int, fold_threshold: int) -> bool:
    """Whether drafts and windows are those that prepare_products_kernel is for: a warp's registers hold what it has of
    them."""
    return fold_threshold <= (16 if nodes <= 8 else 24) and nodes <= 16


def can_take_products(q: torch.Tensor, window: GdnWindow, nodes: int) -> bool:
    """Whether prepare_products_kernel can do it: small drafts and windows, bf16, K a multiple of 32 and at most 128,
    rows that begin at multiples of 16 bytes, an NVIDIA GPU from Ampere on (or Triton's interpreter)."""
    k = window.k
    # (memory that PyTorch hands out begins at multiples of 16 bytes and more)
    aligned = (*q.stride()[:-1], *k.stride()[:-1], q.storage_offset(), k.storage_offset())
    return (
        small_enough(nodes, window.fold_threshold)
        and window.fold_at_once == FOLD_TOKENS  # (so its order has fewer than two entries a lane)
        and q.dtype == k.dtype == torch.bfloat16
        and q.shape[-1] in (32, 64, 96, 128)
        and all(number % 8 == 0 for number in aligned)
        and (q.device.type != "cuda" or compute_capability(q.device) >= (8, 0))
    )


@triton.jit
def _load_rows(rows, first, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    """Of every block of rows, pointers and which are there, bf16 columns `first` on: pair 4 c + i of lane t is columns
    32 c + 8 t + 2 i of them and the next."""
    _, t = row_and_column()
    blocks = ()
    for i in tl.static_range(len(rows)):
        pairs = ()
        for chunk in tl.static_range(COLUMNS // 32):
            pairs = pairs + load_pairs(rows[i][0] + (first + 32 * chunk + 8 * t), rows[i][1], NATIVE)
        blocks = blocks + (pairs,)  # noqa: RUF005 (jit: no unpacking)
    return blocks


@triton.jit
def _position(words, entry, NATIVE: tl.constexpr):
    """An entry of the row's order, of which lane i holds entries i and, where there are so many, 32 + i."""
    found = from_lane(words[0], entry % LANES, NATIVE)
    if len(words) == 2:
        found = tl.where(entry < LANES, found, from_lane(words[1], entry % LANES, NATIVE))
    return found


@triton.jit
def _pending_factors(token0, position, kept, factors_at, stride, heads, NATIVE: tl.constexpr):
    """Of eight tokens that stay pending: beta r, beta r^2 and decays."""
    _, t = row_and_column()
    strengths = ()
    weights = ()
    decays = ()
    positions = at_columns(position, 0, NATIVE)
    for half in tl.static_range(len(heads)):
        for odd in tl.static_range(2):
            live = token0 + 2 * t + odd < kept
            at = factors_at + (positions[odd].to(tl.int64) * stride + heads[half] * FACTORS)
            strength = load(at + 2, live, 0.0, NATIVE)
            decays = decays + (load(at, live, 1.0, NATIVE),)  # noqa: RUF005 (jit: no unpacking)
            strengths = strengths + (strength,)  # noqa: RUF005
            weights = weights + (strength * load(at + 1, live, 0.0, NATIVE),)  # noqa: RUF005
    return strengths, weights, decays


@triton.jit
def _fold_program(
    windows, second, order, folding, to,
    K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What a verify needs to fold the oldest tokens of both heads, made while the convolution runs. windows: of the
    heads' keys, g and beta, and two strides."""
    k_head, g_head, beta_head, stride_k, stride = windows
    if folding > 0:
        at, live = step_tokens(0, folding, order)
        products = key_products(k_head, stride_k, at, live, K, PARTS, PART, NATIVE)
        first = step_factors(products, g_head, beta_head, stride, at, live)
        last = first
        if second > 0:
            last = step_factors(products, g_head + second, beta_head + second, stride, at, live)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        store_factors(to, first)
        if second > 0:
            store_factors(to + STEP_FLOATS, last)


@triton.jit
def _queries_program(
    q, raw, scale, hv, second, window, strides, words, path, counts, carried, weights,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, PENDING: tl.constexpr, ADDENDS: tl.constexpr,
    NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x and y of the row's nodes for head hv and the one `second` further.

    raw: a and b of the row, A_log, dt_bias and two strides.
    """
    BLOCKS: tl.constexpr = (PENDING + BLOCK - 1) // BLOCK  # of pending tokens
    NODE_BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    HALF: tl.constexpr = BLOCK // 2
    # what a warp's registers hold of all keys at once
    COLUMNS: tl.constexpr = K if NODE_BLOCKS == 1 else 32
    a, b, A_log, dt_bias, stride_a, stride_b = raw
    window_k, window_g, window_beta, window_factors = window
    stride_q, stride_wk, stride_gate, stride_factors = strides
    before, kept = counts
    g, t = row_and_column()
    # the node and the head of row g: both heads in one block of rows, a block each, or one head's nodes in two
    if N <= HALF:
        nodes = (g % HALF,)
        heads = (g // HALF * second,)
        lives = ((nodes[0] < N) & (g // HALF <= second),)
    elif N <= BLOCK:
        nodes = (g, g)
        heads = (g * 0, g * 0 + second)
        lives = (g < N, (g < N) & (second > 0))
    else:
        nodes = (g, g + BLOCK)
        heads = (g * 0, g * 0)
        lives = (g < N, g + BLOCK < N)

    # what is there before the convolution has ended
    rows = ()
    strengths = ()
    all_weights = ()
    decays = ()
    for block in tl.static_range(BLOCKS - 1, -1, -1):
        token0 = block * BLOCK
        at = _position(words, before - kept + token0 + g, NATIVE)
        rows = rows + ((window_k + at.to(tl.int64) * stride_wk, token0 + g < kept),)  # noqa: RUF005 (jit: no unpacking)
        its_strengths, its_weights, its_decays = _pending_factors(
            token0, at, kept, window_factors, stride_factors, heads[: 2 // NODE_BLOCKS], NATIVE
        )
        if NODE_BLOCKS == 2:  # (of both blocks of rows)
            its_strengths, its_weights, its_decays = its_strengths * 2, its_weights * 2, its_decays * 2
        strengths = strengths + (its_strengths,)  # noqa: RUF005
        all_weights = all_weights + (its_weights,)  # noqa: RUF005
        decays = decays + (its_decays,)  # noqa: RUF005
    pending_keys = _load_rows(rows, 0, COLUMNS, NATIVE)
    positions = ()
    for block in tl.static_range(NODE_BLOCKS - 1, -1, -1):
        positions = positions + (_position(words, before + block * BLOCK + g, NATIVE).to(tl.int64),)  # noqa: RUF005
    # lane 4 g + t works out the gates of node g and head t % 2, or of node g or g + 8
    if NODE_BLOCKS == 1:
        own, head, position = g, t % 2 * second, positions[0]
    else:
        own, head = g + t % 2 * BLOCK, 0
        position = tl.where(t % 2 == 0, positions[1], positions[0])
    paths = ()
    for half in tl.static_range(len(heads)):
        paths = paths + (tl.load(path + nodes[half], mask=nodes[half] < N, other=0).to(tl.int32),)  # noqa: RUF005
    A, bias = tl.load(A_log + hv + head), tl.load(dt_bias + hv + head)
    raw_a = tl.load(a + own * stride_a + head, mask=own < N, other=0)
    raw_b = tl.load(b + own * stride_b + head, mask=own < N, other=0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    query_rows = ()
    for half in tl.static_range(NODE_BLOCKS):
        query_rows = query_rows + ((q + nodes[half] * stride_q, nodes[half] < N),)  # noqa: RUF005
    node_rows = ()
    for i in tl.static_range(NODE_BLOCKS):
        live = (NODE_BLOCKS - 1 - i) * BLOCK + g < N
        node_rows = node_rows + ((window_k + positions[i] * stride_wk, live),)  # noqa: RUF005
    queries = _load_rows(query_rows, 0, COLUMNS, NATIVE)
    keys = _load_rows(node_rows, 0, COLUMNS, NATIVE) + pending_keys
    rows = node_rows + rows
    # while they are on their way
    log_decay, beta = gates(raw_a, raw_b, A, bias)
    decay = exp_rn(log_decay)
    betas = ()
    node_decays = ()
    for block in tl.static_range(NODE_BLOCKS - 1, -1, -1):
        of_block = ()
        decays_of_block = ()
        for half in tl.static_range(len(heads)):
            lane = heads[half] if NODE_BLOCKS == 1 else block
            its_betas, its_decays = at_columns(beta, lane, NATIVE), at_columns(decay, lane, NATIVE)
            for odd in tl.static_range(2):
                column = block * BLOCK + 2 * t + odd
                on = ((nodes[half] == column) | (((paths[half] >> column) & 1) != 0)) & (nodes[half] < N)
                of_block = of_block + (tl.where(on, its_betas[odd], 0.0),)  # noqa: RUF005
                decays_of_block = decays_of_block + (tl.where(on, its_decays[odd], 1.0),)  # noqa: RUF005
        betas = betas + (of_block,)  # noqa: RUF005
        node_decays = node_decays + (decays_of_block,)  # noqa: RUF005
    d, of_path = decays_after(node_decays + decays, NATIVE)

    sums = add_products((), queries, keys, NODE_BLOCKS, NATIVE)
    for first in tl.static_range(COLUMNS, K, COLUMNS):
        queries = _load_rows(query_rows, first, COLUMNS, NATIVE)
        keys = _load_rows(rows, first, COLUMNS, NATIVE)
        sums = add_products(sums, queries, keys, NODE_BLOCKS, NATIVE)
    norms, of_queries, rnorms, products = products_of(sums, NODE_BLOCKS, NODE_BLOCKS + BLOCKS, NATIVE)
    scales = ()
    for half in tl.static_range(len(heads)):
        scales = scales + (scale * norms[half],)  # noqa: RUF005
    residuals = ()
    for i in tl.static_range(NODE_BLOCKS + BLOCKS):
        residual = ()
        for of in tl.static_range(2 * len(heads)):
            residual = residual + (scales[of // 2] * of_queries[i][of],)  # noqa: RUF005
        residuals = residuals + (residual,)  # noqa: RUF005

    # what later verifies take of these nodes as they are
    if NODE_BLOCKS == 1:
        appends, rnorm = (g < N) & (t <= second), rnorms[0]
    else:
        appends, rnorm = (own < N) & (t < 2), tl.where(t % 2 == 0, rnorms[1], rnorms[0])
    store(window_g + (position * stride_gate + head), log_decay, appends, NATIVE)
    store(window_beta + (position * stride_gate + head), beta, appends, NATIVE)
    to = window_factors + (position * stride_factors + head * FACTORS)
    store(to, decay, appends, NATIVE)
    store(to + 1, rnorm, appends, NATIVE)
    store(to + 2, beta * rnorm, appends, NATIVE)

    node_strengths = ()
    node_weights = ()
    for i in tl.static_range(NODE_BLOCKS):
        r = at_columns(rnorms[i], 0, NATIVE)
        its_strengths = ()
        its_weights = ()
        for of in tl.static_range(2 * len(heads)):
            its_strengths = its_strengths + (betas[i][of] * r[of % 2],)  # noqa: RUF005
            its_weights = its_weights + (betas[i][of] * r[of % 2] * r[of % 2],)  # noqa: RUF005
        node_strengths = node_strengths + (its_strengths,)  # noqa: RUF005
        node_weights = node_weights + (its_weights,)  # noqa: RUF005
    strengths = node_strengths + strengths
    all_weights = node_weights + all_weights
    solved = solve(residuals, all_weights, products, NODE_BLOCKS, N, PENDING, NATIVE)

    taken = ()
    for i in tl.static_range(NODE_BLOCKS + BLOCKS):
        # the pending tokens' rows of y, then the nodes'
        if i < NODE_BLOCKS:
            column = (NODE_BLOCKS - 1 - i) * BLOCK + 2 * t
            count = N
            row = kept + column
        else:
            column = (NODE_BLOCKS + BLOCKS - 1 - i) * BLOCK + 2 * t
            count = kept
            row = column
        z = ()
        for half in tl.static_range(len(heads)):
            to = weights + (row * N + nodes[half] + heads[half] * (BT * N))
            for odd in tl.static_range(2):
                R = solved[i][2 * half + odd]
                y = R * (strengths[i][2 * half + odd] * d[i][2 * half + odd])
                store(to + odd * N, y, lives[half] & (column + odd < count), NATIVE)
                z = z + (-R * all_weights[i][2 * half + odd] * of_path[half],)  # noqa: RUF005
        taken = taken + (z,)  # noqa: RUF005
    factors = left_factors(taken, ADDENDS, NATIVE)
    to, low_halves = carried
    to += 8 * t
    for chunk in tl.static_range(K // 32):
        if COLUMNS < K:
            # once more, now from the cache
            queries = _load_rows(query_rows, 32 * chunk, COLUMNS, NATIVE)
            keys = _load_rows(rows, 32 * chunk, COLUMNS, NATIVE)
        blocks = two_at_a_time(keys)
        high = ((), ())
        low = ((), ())
        for i in tl.static_range(0 if COLUMNS < K else 4 * chunk, 4 if COLUMNS < K else 4 * chunk + 4):
            x = ()
            for half in tl.static_range(2):
                if half < len(heads):
                    of_node = scales[half] * of_path[half]
                    pair = queries[half * (NODE_BLOCKS - 1)][i]
                    x = x + (of_node * even_of(pair), of_node * odd_of(pair))  # noqa: RUF005
                else:
                    x = x + (tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32))  # noqa: RUF005
            turned = ()
            for j in tl.static_range(len(blocks)):
                of_pair = ()
                for k in tl.static_range(len(blocks[j])):
                    of_pair = of_pair + (turn(blocks[j][k][i], NATIVE),)  # noqa: RUF005
                turned = turned + (of_pair,)  # noqa: RUF005
            for part in tl.static_range(ADDENDS):
                for j in tl.static_range(len(blocks)):
                    x = mma(factors[part][j], turned[j], x, NATIVE)
            highs = ()
            lows = ()
            for half in tl.static_range(2):
                even, odd = x[2 * half], x[2 * half + 1]
                highs = highs + (high[half] + (pair_cut(even, odd),),)  # noqa: RUF005
                lows = lows + (low[half] + (pair_rounded(without_cut(even), without_cut(odd), NATIVE),),)  # noqa: RUF005
            high, low = highs, lows
        for half in tl.static_range(len(heads)):
            at = to + ((heads[half] * N + nodes[half]) * K + 32 * chunk)
            store_pairs(at, high[half], lives[half], NATIVE)
            store_pairs(at + low_halves, low[half], lives[half], NATIVE)


@triton.jit
def prepare_products_kernel(
    q, a, b, A_log, dt_bias, scale, slots, rows, schedule, pending, newest, order,
    window_k, window_g, window_beta, window_factors, ancestors, carried, weights, fold_factors,
    fold_threshold, fold_at_once, capacity,
    stride_q, stride_a, stride_b, stride_ancestors, stride_wk_row, stride_wk, stride_gate_row, stride_gate,
    stride_factors_row, stride_factors,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, PENDING: tl.constexpr,
    WORDS: tl.constexpr, HEADS: tl.constexpr, ADDENDS: tl.constexpr, FOLD_STEPS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """prepare_kernel with SPLIT and one step a fold, for up to PENDING tokens that stay pending.

    Programs along the first axis: HEADS value heads of a row each. Along the second: their queries, their folds.
    """
    GROUP: tl.constexpr = HV // H
    PROGRAMS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # of a key head
    tl.static_assert(FOLD_STEPS == 1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    folds = tl.program_id(1) == 1
    batch_row = tl.program_id(0) // (H * PROGRAMS)
    if schedule is not None:  # noqa: SIM102 (known when compiled)
        if folds:
            batch_row = tl.load(schedule + batch_row)
    batch_row = batch_row.to(tl.int64)
    h = tl.program_id(0) // PROGRAMS % H
    first_of_group = tl.program_id(0) % PROGRAMS * HEADS
    hv = h * GROUP + first_of_group
    second = HEADS - 1
    if GROUP % HEADS == 1:
        second = tl.where(first_of_group + 1 < GROUP, 1, 0)
    slot = tl.load(slots + batch_row).to(tl.int64)
    row = tl.load(rows + batch_row).to(tl.int64)
    # (no row is negative: asked, so that both loads are on their way at once)
    if (slot <= 0) | (row < 0):
        if OVERLAP:
            # whoever waits for this kernel waits for the convolution too
            tl.extra.cuda.gdc_wait()
        return
    order += row * capacity
    window_k += row * stride_wk_row + h * K
    window_g += row * stride_gate_row + hv
    window_beta += row * stride_gate_row + hv
    window_factors += row * stride_factors_row + hv * FACTORS
    state = batch_row * HV + hv  # of all rows' heads
    if folds:
        _, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
        windows = (window_k, window_g, window_beta, stride_wk, stride_gate)
        to = fold_factors + state * STEP_FLOATS
        _fold_program(windows, second, order, folding, to, K, PARTS, PART, NATIVE, OVERLAP)
    else:
        # looked up at once, before it is known which entries are asked for
        lane = tl.arange(0, LANES)
        words = ()
        for word in tl.static_range(WORDS):
            entry = LANES * word + lane
            words = words + (load(order + entry, entry < capacity, 0, NATIVE),)  # noqa: RUF005 (jit: no unpacking)
        before, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
        first = batch_row * N
        raw = (a + first * stride_a + hv, b + first * stride_b + hv, A_log, dt_bias, stride_a, stride_b)
        halves = (carried + state * (N * K), tl.num_programs(0).to(tl.int64) // (H * PROGRAMS) * (HV * N * K))
        _queries_program(
            q + first * stride_q + h * K, raw, scale, hv, second,
            (window_k, window_g, window_beta, window_factors),
            (stride_q, stride_wk, stride_gate, stride_factors), words, ancestors + batch_row * stride_ancestors,
            (before, before - folding), halves, weights + state * (N * BT),
            N, K, BT, PENDING, ADDENDS, NATIVE, OVERLAP,
        )  # fmt: skip
