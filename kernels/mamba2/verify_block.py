"""Mamba2 target verify by replay where programs are few: one block of a head's state a program (jit only).

The equation, the operands and what is written are verify_replay.py's, which launches this kernel where streams of
blocks would leave much of the GPU idle. What a step takes then is a program's own chain of waits for memory and
arithmetic in one warp, and the chain is cut where it can be:

- While the convolution runs, a program looks up where its row stands and asks for its state and its tokens' x and B
  (but reads nothing that the convolution writes, and writes nothing: common/dependent.py).
- Behind the wait C, B and x are loaded in one trip, before any of them is renamed (common/fragments.py), and then the
  state, which is in the L2 cache by then.
- It makes its tokens' scores itself: a kernel of their own would bring them later (scores.py).
- It looks at no schedule, a trip more. (Of one row all programs run at once; of seven with 128 heads in some four
  turns, in which rows that fold are not put first.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.ask import ask, line_starts
from ..common.fragments import (
    as_left,
    as_tile,
    inside,
    multiply,
    multiply_add,
    per_column,
    per_row,
    state_addends,
    tile_column,
    tile_row,
)
from ..common.plan import planned
from ..common.tile import IS_KV
from .coefficients import load_nodes, node_terms, path_weights, weighted_scores
from .fold_tile import fold_factors, fold_places, weighted
from .scores import as_keys, as_queries, load_keys, load_queries, places, scores_of


@triton.jit
def _part_of(
    head_state, tile_p, first,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, IS_KV: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Where a part of the block lies, from column `first` on, and what of it is inside."""
    tile_s = first + tile_column(PART, CHUNK)
    there = per_row(inside(tile_p, HEADDIM, HEADDIM % BLOCK_P == 0))
    there = there & per_column(inside(tile_s, DSTATE, DSTATE % PART == 0))
    if IS_KV:
        return head_state + (per_row(tile_p) + per_column(tile_s) * HEADDIM), there
    else:
        return head_state + (per_row(tile_p) * DSTATE + per_column(tile_s)), there


@triton.jit
def _load_block(
    head_state, tile_p,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, IS_KV: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The block as it is stored, in PARTS."""
    states = ()
    for part in tl.static_range(PARTS):
        at, there = _part_of(head_state, tile_p, part * PART, HEADDIM, DSTATE, IS_KV, BLOCK_P, PART, CHUNK)
        states = states + (tl.load(at, mask=there, other=0.0),)  # noqa: RUF005 (jit code has no unpacking)
    return states


@triton.jit
def _store_block(
    head_state, tile_p, states,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, IS_KV: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    for part in tl.static_range(len(states)):
        at, there = _part_of(head_state, tile_p, part * PART, HEADDIM, DSTATE, IS_KV, BLOCK_P, PART, CHUNK)
        tl.store(at, states[part], mask=there)


@triton.jit
def _folded(
    states, positions, lives, window_x_head, stride_x, window_B_group, stride_B, window_dt_head, stride_dt, decay_rate,
    dim, dim_inside,
    DSTATE: tl.constexpr, NATIVE: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The block with the tokens in it that `fold_places` found, rounded to what is stored."""
    PARTNER: tl.constexpr = window_x_head.dtype.element_ty
    xs = ()
    loaded = ()
    for step in tl.static_range(len(positions)):
        x = tl.load(
            window_x_head + positions[step][None, :] * stride_x + dim[:, None],
            mask=lives[step][None, :] & dim_inside[:, None],
            other=0.0,
        )
        xs = xs + (x,)  # noqa: RUF005 (jit code has no unpacking)
        of_step = load_keys(window_B_group, stride_B, positions[step], lives[step], DSTATE, len(states), PART, CHUNK)
        loaded = loaded + (of_step,)  # noqa: RUF005
    shares, kept = fold_factors(positions, lives, window_dt_head, stride_dt, decay_rate)
    factors = ()
    Bs = ()
    for step in tl.static_range(len(positions)):
        factors = factors + (weighted(xs[step], shares[step], PARTNER),)  # noqa: RUF005
        Bs = Bs + (as_keys(loaded[step], CHUNK, NATIVE),)  # noqa: RUF005
    folded = ()
    for part in tl.static_range(len(states)):
        added = tl.zeros((dim.shape[0], PART), tl.float32)
        for step in tl.static_range(len(positions)):
            added = multiply_add(factors[step], (Bs[step][part],), added, NATIVE)
        state = tl.fma(states[part].to(tl.float32), kept, as_tile(added, CHUNK, WARPS))
        folded = folded + (state.to(states[part].dtype),)  # noqa: RUF005
    return folded


@triton.jit
def _ask_for_tokens(
    window_x, stride_x, window_B_group, stride_B, position,
    DSTATE: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Ask for x and B of the tokens at these positions. window_x: at the program's first row. COLUMNS: DSTATE or more,
    a power of two."""
    ask(window_x + position * stride_x, NATIVE)
    lines = line_starts(window_B_group.dtype.element_ty, COLUMNS, DSTATE)
    ask(window_B_group + (position[:, None] * stride_B + lines[None, :]), NATIVE)


@triton.jit
def mamba2_verify_block_kernel(
    dt, C, A, D, dt_bias, y, checkpoint, axis_order, plan, order, window_x, window_B, window_dt, ancestors,
    stride_plan, stride_dt, stride_dt_head, stride_C, stride_A, stride_D, stride_bias, stride_y,
    stride_checkpoint_slot, stride_checkpoint_head, stride_wx_row, stride_wx_pos, stride_wB_row, stride_wB_pos,
    stride_wdt_row, stride_wdt_pos, stride_ancestors,
    N: tl.constexpr, CAPACITY: tl.constexpr, HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, EITHER: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, FOLD_STEPS: tl.constexpr,
    WARPS: tl.constexpr, ASKED: tl.constexpr, STAY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    group = head // HEADS_PER_GROUP
    root, slot, row, before, folding = planned(plan, b, stride_plan)
    kept = before - folding
    # what neither slot nor row say, asked for in one trip with these; tokens: from 0 on those that stay pending, and at
    # the end the nodes
    position, node, is_waiting, is_node = places(tl.arange(0, BLOCK_T), root, kept, N, BLOCK_T, 0, STAY)
    node_i = tl.arange(0, BLOCK_I)
    is_i = node_i < N
    tokens = (node_i, position, node, is_waiting, is_node)
    loaded = load_nodes(
        dt + b * N * stride_dt + head * stride_dt_head, A, D, dt_bias, ancestors + b * stride_ancestors, head, node,
        is_node, node_i, (stride_dt, stride_A, stride_D, stride_bias), N, HAS_D, HAS_BIAS,
    )  # fmt: skip
    dim = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    dim_inside = inside(dim, HEADDIM, HEADDIM % BLOCK_P == 0)
    y_at = y + b * N * stride_y + head * HEADDIM + (node_i[None, :] * stride_y + dim[:, None])
    y_there = is_i[None, :] & dim_inside[:, None]
    if slot <= 0:
        if OVERLAP:  # who waits for this kernel must find the one before it ended
            tl.extra.cuda.gdc_wait()
        tl.store(y_at, tl.zeros((BLOCK_P, BLOCK_I), y.dtype.element_ty), mask=y_there)
        return

    head_state = checkpoint + slot * stride_checkpoint_slot + head * stride_checkpoint_head
    # of a slot that lies as KV, a part of the block
    first_element = tl.program_id(1) * (BLOCK_P * DSTATE)
    lines = line_starts(checkpoint.dtype.element_ty, ASKED, HEADDIM * DSTATE - first_element)
    ask(head_state + first_element + lines, NATIVE)
    window_x_head = window_x + row * stride_wx_row + head * HEADDIM
    window_B_group = window_B + row * stride_wB_row + group * DSTATE
    window_dt_head = window_dt + row * stride_wdt_row + head
    is_kv = False
    if EITHER:
        is_kv = tl.load(axis_order + slot) == IS_KV
    positions, lives = fold_places(folding, order + row * CAPACITY, FOLD_STEPS)
    dt_waiting = tl.load(window_dt_head + position * stride_wdt_pos, mask=is_waiting, other=0.0)
    COLUMNS: tl.constexpr = ASKED // BLOCK_P
    x_block = window_x_head + tl.program_id(1) * BLOCK_P
    _ask_for_tokens(x_block, stride_wx_pos, window_B_group, stride_wB_pos, position, DSTATE, COLUMNS, NATIVE)
    if folding > 0:
        for step in tl.static_range(FOLD_STEPS):
            place = positions[step]
            ask(window_dt_head + place * stride_wdt_pos, NATIVE)
            _ask_for_tokens(x_block, stride_wx_pos, window_B_group, stride_wB_pos, place, DSTATE, COLUMNS, NATIVE)
    decay_rate, skip, dt_node, g_i, path_i = node_terms(loaded, is_node, node_i, N, SOFTPLUS)
    there = is_waiting | is_node

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    C_loaded = load_queries(C + b * N * stride_C + group * DSTATE, stride_C, is_i, node_i, DSTATE, PARTS, PART, CHUNK)
    B_loaded = load_keys(window_B_group, stride_wB_pos, position, there, DSTATE, PARTS, PART, CHUNK)
    x = tl.load(
        window_x_head + position[None, :] * stride_wx_pos + dim[:, None],
        mask=there[None, :] & dim_inside[:, None],
        other=0.0,
    )
    tile_p = tl.program_id(1) * BLOCK_P + tile_row(BLOCK_P, WARPS)
    if EITHER and is_kv:
        states = _load_block(head_state, tile_p, HEADDIM, DSTATE, True, BLOCK_P, PARTS, PART, CHUNK)
    else:
        states = _load_block(head_state, tile_p, HEADDIM, DSTATE, False, BLOCK_P, PARTS, PART, CHUNK)
    C_parts = as_queries(C_loaded, CHUNK, NATIVE)
    scores = scores_of(as_keys(B_loaded, CHUNK, NATIVE), C_parts, NATIVE)
    rate = decay_rate.to(tl.float64)
    terms = (tl.where(is_node, dt_node, dt_waiting), rate * dt_waiting.to(tl.float64), g_i, path_i)
    weights, _, state_decay = path_weights(terms, tokens, ())
    if folding > 0:
        states = _folded(
            states, positions, lives, window_x_head, stride_wx_pos, window_B_group, stride_wB_pos, window_dt_head,
            stride_wdt_pos, decay_rate, dim, dim_inside, DSTATE, NATIVE, PART, CHUNK, WARPS,
        )  # fmt: skip
    PARTNER: tl.constexpr = C.dtype.element_ty
    COUNT: tl.constexpr = 3 if y.dtype.element_ty == tl.float32 else 2
    cut = ()
    for part in tl.static_range(PARTS):
        # outputs start from what is written, as the next verify's will
        cut = cut + (state_addends(as_left(states[part], WARPS), PARTNER, COUNT),)  # noqa: RUF005

    if tl.program_id(1) == 0:
        tl.store(window_dt_head + position * stride_wdt_pos, dt_node, mask=is_node)
    if folding > 0:
        if EITHER and is_kv:
            _store_block(head_state, tile_p, states, HEADDIM, DSTATE, True, BLOCK_P, PART, CHUNK)
        else:
            _store_block(head_state, tile_p, states, HEADDIM, DSTATE, False, BLOCK_P, PART, CHUNK)
    coefficient = weighted_scores(scores, weights, skip, HAS_D, PARTNER, COUNT)
    output = multiply((x,), coefficient, NATIVE)
    from_state = tl.zeros((BLOCK_P, BLOCK_I), tl.float32)
    for part in tl.static_range(PARTS):
        # a plain sum would become the product's accumulator, which is cut short in every step
        from_state = tl.fma(multiply(cut[part], (C_parts[part],), NATIVE), 1.0, from_state)
    output = tl.fma(from_state, state_decay[None, :], output)
    tl.store(y_at, output.to(y.dtype.element_ty), mask=y_there)
