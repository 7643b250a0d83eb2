"""Mamba2 (SSD) target verify by replay: outputs of a draft tree from one read of the checkpoint.

A window holds the row's pending tokens, then this step's nodes. With g = A dt, anc(i) = all pending tokens and node
i's strict ancestors, and G the sum of g along a path,

    y_i = C_i (e^{G_i} S0 + sum_{t in anc(i)+i} e^{G_i - G_t} dt_t B_t x_t^T) + D x_i

S0 = checkpoint[slot]. No solve: the tree only decides which terms count. Sums of g are float64, where a difference of
two is as good as the sum between, so strong decays upstream of t cost no digits. D joins the diagonal term, both being
coefficients of x_i (coefficients.py).

A row with more than fold_threshold pending tokens first folds the oldest into its checkpoint, as many as the step's
plan says (common/plan.py), exactly (fold_tile.py), and writes it; its outputs start from the written state. Pending
counts are not touched here: the commit (common/window.py) asks the same rule (common/pending.py).

Precision: 16-bit x, B, C are exact on tensor cores; their float32 partner (state, coefficients) goes in addends
(common/fragments.py), two for an output of 16 bits and three for float32.

Layouts: y [T, H, P], C [T, G, D], token b*N+i is node i of batch row b; checkpoint [S, H, P, D], or [S, H, D, P] in
slots that lie as KV (common/axis_order.py); windows keyed by row, position order[row, t] holding pending token t,
order[row, p+i] node i, whose x and B the convolution has put there (conv1d/verify_replay.py). A program owns one head
of one row and keeps the tokens' coefficients in registers while it streams the state past them, from the registers it
comes in to tensor cores. It makes them in the stream's first turn, while the first blocks are on their way, from scores
that a kernel before it makes once a group (scores.py), or that it makes itself (`makes_scores_once`). The scores'
kernel lets this one start when the convolution has ended: until the scores are there, a program looks up where its row
stands, its nodes' inputs and the tokens of its first tile, and asks for its first block. Where rows and heads are few
and a warp can hold what a block takes, verify_block.py is launched in its place.

Source: the state-space duality of Mamba2 (arXiv 2405.21060), with a tree mask as in STree (arXiv 2505.14969).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.ask import ask, line_starts
from ..common.dependent import has_dependent_launch
from ..common.fragments import (
    as_left,
    as_tile,
    chunk_of,
    inside,
    load_rows,
    multiply,
    multiply_add,
    per_column,
    per_row,
    rows_as_left,
    state_addends,
    tile_column,
    tile_row,
)
from ..common.grid import launch_grid
from ..common.operands import Rows, States
from ..common.plan import planned
from ..common.tile import IS_KV
from .arguments import check_sizes, parameters
from .coefficients import coefficients, load_nodes, no_coefficients, node_terms
from .fold_tile import TOKENS, fold_factors, fold_places, weighted
from .scores import (
    as_keys,
    as_queries,
    later_places,
    load_keys,
    load_queries,
    mamba2_scores,
    places,
    scores_of,
)
from .verify_block import mamba2_verify_block_kernel
from .window import Mamba2Window

PART = 64  # state columns of a product: fewer registers, and shorter sums in the tensor cores' own rounding
OWN_SCORES_HEADS, OWN_SCORES_NODES = 4096, 8  # up to so many a program of one warp may make its own scores,
OWN_SCORES_HEADS_OF_MORE_WARPS = 1024  # and one of more
FEW_HEADS, FEW_HEADS_OF_SMALL_TREES = 512, 1024  # below so many, all rows together, a program has one block
KEPT_COLUMNS = 2 * 128  # of the pending tokens' B, in registers: two products' tokens at dstate 128


class Tiling(NamedTuple):
    """Launch shape. A program streams blocks_per_program blocks of block_p state rows each."""

    block_p: int
    blocks_per_program: int
    num_warps: int
    num_stages: int
    max_registers: int = 0  # a thread; 0: the compiler's choice


@triton.jit
def _stream(
    checkpoint_head, first_block, C_parts, tokens, more, inputs, fold, weighing,
    N: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, IS_KV: tl.constexpr, FOLDS: tl.constexpr,
    FOLD_STEPS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, KEEP_B: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
    HAS_D: tl.constexpr,
):  # fmt: skip
    """Outputs of some blocks of one head's state, folded first if FOLDS.

    tokens: which there are, and where in the window. more: pending ones that find no place in them (coefficients.py).
    inputs: this head's window and y, and their strides. fold: what the pending tokens' fold needs. weighing: what
    the tokens' coefficients are made of.
    """
    node_i, position, _, is_waiting, is_node = tokens
    window_x_head, stride_wx_pos, y_head, stride_y = inputs
    PARTNER: tl.constexpr = C_parts[0].dtype
    MORE: tl.constexpr = more[0].shape[0] if len(more) > 0 else 0
    coefficient, after, state_decay = no_coefficients(position.shape[0], MORE, node_i.shape[0], PARTNER, COUNT)
    for block in range(first_block, first_block + BLOCKS):
        if block == first_block:  # when the first blocks of the state are on their way
            coefficient, after, state_decay = coefficients(weighing, tokens, more, HAS_D, PARTNER, COUNT)
        dim = block * BLOCK_P + tl.arange(0, BLOCK_P)
        dim_inside = inside(dim, HEADDIM, HEADDIM % (BLOCK_P * BLOCKS) == 0)
        # [dims, tokens], as the product takes it: turned after the load, it would go through shared memory twice
        there = (is_waiting | is_node)[None, :] & dim_inside[:, None]
        x = tl.load(window_x_head + position[None, :] * stride_wx_pos + dim[:, None], mask=there, other=0.0)
        output = multiply((x,), coefficient, NATIVE)
        if len(more) > 0:
            x_more = tl.load(
                window_x_head + more[0][None, :] * stride_wx_pos + dim[:, None],
                mask=more[1][None, :] & dim_inside[:, None],
                other=0.0,
            )
            output = multiply_add((x_more,), after, output, NATIVE)
        factors = ()
        if FOLDS:
            window_B_group, stride_wB_pos, positions, lives, shares, B_folds, kept = fold
            for step in tl.static_range(FOLD_STEPS):
                x_fold = tl.load(
                    window_x_head + positions[step][None, :] * stride_wx_pos + dim[:, None],
                    mask=lives[step][None, :] & dim_inside[:, None],
                    other=0.0,
                )
                factors = factors + (weighted(x_fold, shares[step], PARTNER),)  # noqa: RUF005 (jit has no unpacking)
        tile_p = block * BLOCK_P + tile_row(BLOCK_P, WARPS)
        tile_p_inside = inside(tile_p, HEADDIM, HEADDIM % (BLOCK_P * BLOCKS) == 0)
        from_state = tl.zeros((BLOCK_P, node_i.shape[0]), tl.float32)
        for part in tl.static_range(PARTS):
            tile_s = part * PART + tile_column(PART, CHUNK)
            if IS_KV:
                at = checkpoint_head + (per_row(tile_p) + per_column(tile_s) * HEADDIM)
            else:
                at = checkpoint_head + (per_row(tile_p) * DSTATE + per_column(tile_s))
            tile_inside = per_row(tile_p_inside) & per_column(inside(tile_s, DSTATE, DSTATE % PART == 0))
            state = tl.load(at, mask=tile_inside, other=0.0)
            if FOLDS:
                added = tl.zeros((BLOCK_P, PART), tl.float32)
                for step in tl.static_range(FOLD_STEPS):
                    if KEEP_B:
                        B_fold = B_folds[step * PARTS + part]
                    else:
                        at_B = (positions[step], lives[step], part * PART)
                        B_fold = load_rows(window_B_group, stride_wB_pos, at_B, DSTATE, PART, CHUNK)
                        B_fold = rows_as_left(B_fold, CHUNK, NATIVE)
                    added = multiply_add(factors[step], (B_fold,), added, NATIVE)
                folded = tl.fma(state.to(tl.float32), kept, as_tile(added, CHUNK, WARPS))
                # outputs start from what is written, as the next verify's will
                state = folded.to(state.dtype)
                tl.store(at, state, mask=tile_inside)
            product = multiply(state_addends(as_left(state, WARPS), PARTNER, COUNT), (C_parts[part],), NATIVE)
            # a plain sum would become the product's accumulator, which is cut short in every step
            from_state = tl.fma(product, 1.0, from_state)
        output = tl.fma(from_state, state_decay[None, :], output)
        tl.store(
            y_head + node_i[None, :] * stride_y + dim[:, None],
            output.to(y_head.dtype.element_ty),
            mask=(node_i < N)[None, :] & dim_inside[:, None],
        )


@triton.jit
def _stream_row(
    place, C_parts, tokens, more, inputs, waiting, weighing,
    N: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, EITHER: tl.constexpr, FOLD_STEPS: tl.constexpr,
    COUNT: tl.constexpr, NATIVE: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr, KEEP_B: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """_stream as the row's state lies, and with the fold that it is due.

    place: the head's state, the first block, and whether it lies as KV. waiting: how many of the pending tokens are to
    be folded, and where their inputs are.
    """
    checkpoint_head, first_block, is_kv = place
    folding, order_row, window_B_group, stride_wB_pos, window_dt_head, stride_wdt_pos, decay_rate = waiting
    if folding > 0:
        positions, lives = fold_places(folding, order_row, FOLD_STEPS)
        shares, kept = fold_factors(positions, lives, window_dt_head, stride_wdt_pos, decay_rate)
        B_folds = ()
        if KEEP_B:
            loaded = ()
            for step in tl.static_range(FOLD_STEPS):
                loaded = loaded + load_keys(
                    window_B_group, stride_wB_pos, positions[step], lives[step], DSTATE, PARTS, PART, CHUNK
                )
            B_folds = as_keys(loaded, CHUNK, NATIVE)
        fold = (window_B_group, stride_wB_pos, positions, lives, shares, B_folds, kept)
        if EITHER and is_kv:
            _stream(
                checkpoint_head, first_block, C_parts, tokens, more, inputs, fold, weighing, N, HEADDIM, DSTATE, True,
                True, FOLD_STEPS, COUNT, NATIVE, BLOCK_P, PARTS, PART, CHUNK, KEEP_B, BLOCKS, WARPS, HAS_D,
            )  # fmt: skip
        else:
            _stream(
                checkpoint_head, first_block, C_parts, tokens, more, inputs, fold, weighing, N, HEADDIM, DSTATE, False,
                True, FOLD_STEPS, COUNT, NATIVE, BLOCK_P, PARTS, PART, CHUNK, KEEP_B, BLOCKS, WARPS, HAS_D,
            )  # fmt: skip
    elif EITHER and is_kv:
        _stream(
            checkpoint_head, first_block, C_parts, tokens, more, inputs, (), weighing, N, HEADDIM, DSTATE, True,
            False, FOLD_STEPS, COUNT, NATIVE, BLOCK_P, PARTS, PART, CHUNK, KEEP_B, BLOCKS, WARPS, HAS_D,
        )  # fmt: skip
    else:
        _stream(
            checkpoint_head, first_block, C_parts, tokens, more, inputs, (), weighing, N, HEADDIM, DSTATE, False,
            False, FOLD_STEPS, COUNT, NATIVE, BLOCK_P, PARTS, PART, CHUNK, KEEP_B, BLOCKS, WARPS, HAS_D,
        )  # fmt: skip


@triton.jit
def _mamba2_verify_kernel(
    dt, C, A, D, dt_bias, y, checkpoint, axis_order, plan, order, window_x, window_B, window_dt, ancestors,
    stride_plan, stride_dt, stride_dt_head, stride_C, stride_A, stride_D, stride_bias, stride_y,
    stride_checkpoint_slot, stride_checkpoint_head, stride_wx_row, stride_wx_pos, stride_wB_row, stride_wB_pos,
    stride_wdt_row, stride_wdt_pos, stride_ancestors, scores, schedule,
    N: tl.constexpr, CAPACITY: tl.constexpr, HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, HAS_SCHEDULE: tl.constexpr, EITHER: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    MORE: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    FOLD_STEPS: tl.constexpr, KEEP_B: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr, ASKED: tl.constexpr,
    STAY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    if HAS_SCHEDULE:
        b = tl.load(schedule + b).to(tl.int64)
    first_block = tl.program_id(1) * BLOCKS
    group = head // HEADS_PER_GROUP
    root, slot, row, before, folding = planned(plan, b, stride_plan)
    kept = before - folding
    # what neither slot nor row say, asked for in one trip with these; tokens: from 0 on those that stay pending, and at
    # the end the nodes
    position, node, is_waiting, is_node = places(tl.arange(0, BLOCK_T), root, kept, N, BLOCK_T, MORE, STAY)
    node_i = tl.arange(0, BLOCK_I)
    tokens = (node_i, position, node, is_waiting, is_node)
    loaded = load_nodes(
        dt + b * N * stride_dt + head * stride_dt_head, A, D, dt_bias, ancestors + b * stride_ancestors, head, node,
        is_node, node_i, (stride_dt, stride_A, stride_D, stride_bias), N, HAS_D, HAS_BIAS,
    )  # fmt: skip
    y_head = y + b * N * stride_y + head * HEADDIM
    if slot <= 0:
        if OVERLAP:  # who waits for this kernel must find the one before it ended
            tl.extra.cuda.gdc_wait()
        for block in range(first_block, first_block + BLOCKS):
            dim = block * BLOCK_P + tl.arange(0, BLOCK_P)
            tl.store(
                y_head + node_i[None, :] * stride_y + dim[:, None],
                tl.zeros((BLOCK_P, BLOCK_I), y.dtype.element_ty),
                mask=(node_i < N)[None, :] & (dim < HEADDIM)[:, None],
            )
        return

    checkpoint_head = checkpoint + slot * stride_checkpoint_slot + head * stride_checkpoint_head
    # the first block (of a slot that lies as KV, a part of it), while what comes before is looked up and waited for
    first_element = first_block * (BLOCK_P * DSTATE)
    lines = line_starts(checkpoint.dtype.element_ty, ASKED, HEADDIM * DSTATE - first_element)
    ask(checkpoint_head + first_element + lines, NATIVE)
    order_row = order + row * CAPACITY
    window_x_head = window_x + row * stride_wx_row + head * HEADDIM
    window_B_group = window_B + row * stride_wB_row + group * DSTATE
    window_dt_head = window_dt + row * stride_wdt_row + head
    is_kv = False
    if EITHER:
        is_kv = tl.load(axis_order + slot) == IS_KV
    decay_rate, skip, dt_node, g_i, path_i = node_terms(loaded, is_node, node_i, N, SOFTPLUS)
    dt_waiting = tl.load(window_dt_head + position * stride_wdt_pos, mask=is_waiting, other=0.0)
    rate = decay_rate.to(tl.float64)
    terms = (tl.where(is_node, dt_node, dt_waiting), rate * dt_waiting.to(tl.float64), g_i, path_i)

    COUNT: tl.constexpr = 3 if y.dtype.element_ty == tl.float32 else 2
    if OVERLAP and scores is None:
        tl.extra.cuda.gdc_wait()
    C_loaded = load_queries(
        C + b * N * stride_C + group * DSTATE, stride_C, node_i < N, node_i, DSTATE, PARTS, PART, CHUNK
    )
    if scores is None:
        there = is_waiting | is_node
        B_loaded = load_keys(window_B_group, stride_wB_pos, position, there, DSTATE, PARTS, PART, CHUNK)
        C_parts = as_queries(C_loaded, CHUNK, NATIVE)
        scores_t = scores_of(as_keys(B_loaded, CHUNK, NATIVE), C_parts, NATIVE)
    else:
        C_parts = as_queries(C_loaded, CHUNK, NATIVE)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        scores += (b * (HEADS // HEADS_PER_GROUP) + group) * ((BLOCK_T + MORE) * BLOCK_I)
        scores_t = tl.load(scores + tl.arange(0, BLOCK_T)[:, None] * BLOCK_I + node_i[None, :])
    if tl.program_id(1) == 0:
        tl.store(window_dt_head + position * stride_wdt_pos, dt_node, mask=is_node)
    inputs = (window_x_head, stride_wx_pos, y_head, stride_y)
    place = (checkpoint_head, first_block, is_kv)
    waiting = (folding, order_row, window_B_group, stride_wB_pos, window_dt_head, stride_wdt_pos, decay_rate)
    if MORE and kept > BLOCK_T - N:
        at_later, is_later = later_places(tl.arange(0, MORE), root, kept, N, BLOCK_T)
        dt_later = tl.load(window_dt_head + at_later * stride_wdt_pos, mask=is_later, other=0.0)
        if scores is None:
            B_later = load_keys(window_B_group, stride_wB_pos, at_later, is_later, DSTATE, PARTS, PART, CHUNK)
            scores_later = scores_of(as_keys(B_later, CHUNK, NATIVE), C_parts, NATIVE)
        else:
            scores_later = tl.load(scores + (BLOCK_T + tl.arange(0, MORE))[:, None] * BLOCK_I + node_i[None, :])
        more = (at_later, is_later, dt_later, rate * dt_later.to(tl.float64))
        of_all = (terms, (skip, scores_t, scores_later))
        _stream_row(
            place, C_parts, tokens, more, inputs, waiting, of_all, N, HEADDIM, DSTATE, EITHER, FOLD_STEPS, COUNT,
            NATIVE, BLOCK_P, PARTS, PART, CHUNK, KEEP_B, BLOCKS, WARPS, HAS_D,
        )  # fmt: skip
    else:
        of_these = (terms, (skip, scores_t, ()))
        _stream_row(
            place, C_parts, tokens, (), inputs, waiting, of_these, N, HEADDIM, DSTATE, EITHER, FOLD_STEPS, COUNT,
            NATIVE, BLOCK_P, PARTS, PART, CHUNK, KEEP_B, BLOCKS, WARPS, HAS_D,
        )  # fmt: skip


def token_tiles(fold_threshold: int, nodes: int, dstate: int) -> tuple[int, int]:
    """Tokens of a verify: nodes with the pending tokens that fit beside them, and a second tile for those that do not.

    Most rows then have no need of the second, and with one in place of the two they fit into a warp's registers. (With
    a second tile and 16 state columns Triton 3.6 makes a kernel whose fold adds zeros to the state.)
    """
    tokens = fold_threshold + nodes
    if 32 < tokens <= 48 and nodes <= 16 and dstate > 16:
        return 32, 16
    return max(16, triton.next_power_of_2(tokens)), 0


def default_tiling(
    *, headdim: int, dstate: int, nodes: int, fold_threshold: int, batch: int, nheads: int, narrow: bool = False
) -> Tiling:
    """A warp a program streams a head in blocks of 16 rows, one block ahead; few programs: one block each (as always
    where a head has no more), longer of up to 4 nodes that verify_block.py takes.

    Wider states and larger trees and windows take more warps, so that nothing spills. (More rows with them were no way
    out: products' other factors, not the state, fill the registers, and each warp would hold them all.) narrow: states
    of 16 bits.
    """
    tokens, later_tokens = token_tiles(fold_threshold, nodes, dstate)
    warps = 8 if tokens > 64 else 4 if nodes > 16 or tokens > 32 else 2 if dstate > 128 else 1
    one_block = Tiling(16, 1, warps, 1)
    is_small = nodes <= 4 and is_for_a_block(one_block, nodes, later_tokens)
    if batch * nheads < (FEW_HEADS_OF_SMALL_TREES if is_small else FEW_HEADS):
        return one_block
    blocks = triton.cdiv(headdim, 16)
    # 168 registers: three warps more on a multiprocessor, worth what spills for it up to so many nodes
    slim = blocks > 1 and warps == 1 and nodes <= (8 if narrow else 4)
    # of blocks of half the bytes one more has to be on its way
    return Tiling(16, blocks, warps, 3 if narrow and nodes <= 4 else 2, 168 if slim else 0)


def is_for_a_block(tiling: Tiling, nodes: int, later_tokens: int) -> bool:
    """Whether verify_block.py is launched so: one block a program, in one warp, of few nodes and one tile of tokens.

    Of more a warp cannot hold scores, state and decays together. later_tokens: a second tile's.
    """
    one_block = tiling.blocks_per_program == 1 and tiling.num_warps == 1
    return one_block and nodes <= OWN_SCORES_NODES and later_tokens == 0


def makes_scores_once(tiling: Tiling, nodes: int, heads: int) -> bool:
    """Whether a verify of so many heads, all rows together, has its scores made before it (scores.py).

    Where programs are few, their wait for another kernel is longer than what that one saves them. But under a limit of
    registers they have no room for it, and of many nodes scores are a tenth of their time.
    """
    most_heads = OWN_SCORES_HEADS if tiling.num_warps == 1 else OWN_SCORES_HEADS_OF_MORE_WARPS
    return heads > most_heads or nodes > OWN_SCORES_NODES or tiling.max_registers > 0


def constants_for(
    tiling: Tiling,
    *,
    nodes: int,
    heads: int,
    groups: int,
    headdim: int,
    dstate: int,
    capacity: int,
    fold_threshold: int,
    fold_at_once: int,
    state: torch.dtype,
    either: bool,
) -> dict[str, int]:
    """Compile-time sizes that both kernels have. state: its dtype; either: slots may lie in either axis order."""
    block_s = triton.next_power_of_2(dstate)
    block_t, _ = token_tiles(fold_threshold, nodes, dstate)
    # states of 16 bits: a chunk, of which a lane has what it loads of a C of 16 bits at once
    part = min(PART // 2 if state.itemsize == 2 else PART, block_s)
    return {
        "N": nodes,
        "CAPACITY": capacity,
        "HEADS": heads,
        "HEADS_PER_GROUP": heads // groups,
        "HEADDIM": headdim,
        "DSTATE": dstate,
        "EITHER": either,
        "NATIVE": not triton.knobs.runtime.interpret,  # the interpreter multiplies bfloat16 as integers
        "BLOCK_I": max(8, triton.next_power_of_2(nodes)),
        "BLOCK_T": block_t,
        "BLOCK_P": tiling.block_p,
        "PARTS": triton.cdiv(dstate, part),
        "PART": part,
        "CHUNK": chunk_of(state, block_s),
        "FOLD_STEPS": fold_at_once // TOKENS.value,
        "ASKED": tiling.block_p * block_s,
        "STAY": fold_threshold,
        "WARPS": min(tiling.num_warps, tiling.block_p // 16),
    }


def stream_constants(
    tiling: Tiling, *, nodes: int, dstate: int, fold_threshold: int, fold_at_once: int
) -> dict[str, int]:
    """Those that only the kernel has which streams blocks, and the scores' before it."""
    block_s = triton.next_power_of_2(dstate)
    _, later_tokens = token_tiles(fold_threshold, nodes, dstate)
    return {
        "MORE": later_tokens,
        "BLOCKS": tiling.blocks_per_program,
        "KEEP_B": fold_at_once // TOKENS.value * block_s <= KEPT_COLUMNS,
    }


def mamba2_verify(
    dt: torch.Tensor,
    C: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    states: States,
    rows: Rows,
    window: Mamba2Window,
    out: torch.Tensor | None = None,
    after_convolution: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Outputs of the B trees of N nodes; returns y [B*N, H, P] in C's dtype (or `out`, written in place).

    dt          [B*N, H] float, any strides, or expanded to [B*N, H, P]: raw, read.
    C           [B*N, G, D] float, last two dimensions contiguous, any token stride: read, after the convolution.
    A, D, dt_bias
                [H] float, or expanded to [H, P(, D)] with stride 0; D and dt_bias may be None.
    dt_softplus whether the step size is softplus(dt + dt_bias), or dt + dt_bias.
    states      one layer's, [S, H, P, D]: read at the slots; those of rows that fold are written, as they lie.
    rows        with ancestors and a plan. Padding (slot <= 0): y zero, nothing else written.
    window      one layer's, x and B of C's dtype: at the rows, pending entries are read, and of the nodes, which are at
                order[row, pending .. pending + N), x and B too: after the convolution. Their dt is written there.
    out         [B*N, H, P] float, last two dimensions contiguous, any token stride.
    after_convolution
                the kernel launched before this one on the stream, conv1d_verify as a rule, writes nothing of the plan,
                of dt, A, D and dt_bias, of ancestors, axis_order, the order and pending tokens' dt: these are looked up
                while it runs.
    tiling      launch shape, None for the default.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device, and without a plan.
    """
    dt, A, D, dt_bias = parameters(dt, A, D, dt_bias)
    y = C.new_empty(C.shape[0], *window.x.shape[-2:]) if out is None else out
    sizes = check(
        slots=Arg(rows.slots, "B"),
        plan=Arg(rows.plan, ">=B _"),
        ancestors=Arg(rows.ancestors, ">=B N"),
        schedule=Arg(rows.schedule, ">=B"),
        dt=Arg(dt, "B*N H", FLOATS, contiguous=0),
        C=Arg(C, "B*N G D", FLOATS, contiguous=2),
        A=Arg(A, "H", FLOATS, contiguous=0),
        D=Arg(D, "H", FLOATS, contiguous=0),
        dt_bias=Arg(dt_bias, "H", FLOATS, contiguous=0),
        states=Arg(states.data, "S H P D", FLOATS, contiguous=2),
        axis_order=Arg(states.axis_order, "S"),
        order=Arg(window.order, "R C"),
        window_x=Arg(window.x, "R C H P", C.dtype, contiguous=2),
        window_B=Arg(window.B, "R C G D", C.dtype, contiguous=2),
        window_dt=Arg(window.dt, "R C H", torch.float32),
        out=Arg(y, "B*N H P", FLOATS, contiguous=2),
    )
    batch, nodes, nheads, headdim, ngroups, dstate = sizes.get_all("B N H P G D")
    check_sizes(nodes, nheads, ngroups, dstate)
    window.check_room(nodes)
    window.check_reach()
    plan = rows.plan_for(nodes, window.fold_threshold)
    if batch == 0:
        return y
    tiling = tiling or default_tiling(
        headdim=headdim,
        dstate=dstate,
        nodes=nodes,
        fold_threshold=window.fold_threshold,
        batch=batch,
        nheads=nheads,
        narrow=states.data.element_size() == 2,
    )
    constants = constants_for(
        tiling,
        nodes=nodes,
        heads=nheads,
        groups=ngroups,
        headdim=headdim,
        dstate=dstate,
        capacity=window.order.shape[1],
        fold_threshold=window.fold_threshold,
        fold_at_once=window.fold_at_once,
        state=states.data.dtype,
        either=states.axis_order is not None,
    )
    overlap = has_dependent_launch(C.device)
    arguments = (
        dt, C, A, D, dt_bias, y, states.data, states.axis_order, plan, window.order, window.x, window.B, window.dt,
        rows.ancestors, plan.stride(0), dt.stride(0), dt.stride(1), C.stride(0), A.stride(0),
        0 if D is None else D.stride(0), 0 if dt_bias is None else dt_bias.stride(0), y.stride(0),
        states.data.stride(0), states.data.stride(1), window.x.stride(0), window.x.stride(1), window.B.stride(0),
        window.B.stride(1), window.dt.stride(0), window.dt.stride(1), rows.ancestors.stride(0),
    )  # fmt: skip
    options = {
        **constants,
        "HAS_D": D is not None,
        "HAS_BIAS": dt_bias is not None,
        "SOFTPLUS": dt_softplus,
        "OVERLAP": overlap,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    if tiling.max_registers:
        options["maxnreg"] = tiling.max_registers
    grid = launch_grid(batch * nheads, triton.cdiv(headdim, tiling.block_p * tiling.blocks_per_program))
    early = overlap and after_convolution
    stream = stream_constants(
        tiling, nodes=nodes, dstate=dstate, fold_threshold=window.fold_threshold, fold_at_once=window.fold_at_once
    )
    if is_for_a_block(tiling, nodes, stream["MORE"]):
        mamba2_verify_block_kernel[grid](*arguments, **options, launch_pdl=early)
        return y
    scores = None
    if makes_scores_once(tiling, nodes, batch * nheads):
        scores = mamba2_scores(C, window.B, plan, constants=constants | stream, overlap=overlap, early=early)
    _mamba2_verify_kernel[grid](
        *arguments, scores, rows.schedule, **options,
        HAS_SCHEDULE=rows.schedule is not None,
        **stream,
        launch_pdl=early or (overlap and scores is not None),
    )  # fmt: skip
    return y
