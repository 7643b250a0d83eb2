"""Mamba2 (SSD) target verify by replay: outputs of a draft tree from one read of the checkpoint.

A window holds the row's pending tokens, then this step's nodes. With g = A dt, anc(i) = all pending tokens and node
i's strict ancestors, and G the sum of g along a path,

    y_i = C_i (e^{G_i} S0 + sum_{j in anc(i)+i} e^{G_i - G_j} dt_j B_j x_j^T) + D x_i

S0 = checkpoint[slot]. No solve: the tree only decides which terms count. G_i - G_j is a difference of float64 sums
(nodes) or a sum over the tokens behind j (pending), so strong decays upstream of j cost no digits. D joins the
diagonal term, both being coefficients of x_i.

A row with more than fold_threshold pending tokens first replays them into its checkpoint, exactly (fold_tile.py), and
writes it; its outputs start from the written state. Pending counts are not touched here: the commit
(common/window.py) applies the same threshold.

Precision: 16-bit x, B, C are exact in tf32, so a product needs only its float32 factor split, hi + lo, and two
tensor-core passes give float32 accuracy. A 16-bit checkpoint is exact too and takes one. float32 inputs go through
tf32x3.

Layouts: x, y [T, nheads, headdim], B, C [T, ngroups, dstate], token b*N+i is node i of batch row b; checkpoint
[S, nheads, headdim, dstate], or [S, nheads, dstate, headdim] in slots that lie as KV
(common/axis_order.py); windows keyed by
row, position order[row, j] holding pending token j, order[row, p+i] receiving node i. A program owns one head of one
row (or some of its headdim blocks) and keeps node and window coefficients in registers while it streams the state past
them.

Source: the state-space duality of Mamba2 (arXiv 2405.21060), with a tree mask as in STree (arXiv 2505.14969).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.elementary import softplus_rn
from ..common.grid import launch_grid
from ..common.operands import Rows, States
from ..common.tile import IS_KV, load_state, store_state
from .arguments import check_sizes, parameters
from .fold_tile import inside, replay_tokens
from .window import Mamba2Window

PART = 64  # state columns a dot takes at once: fewer registers, and shorter sums in the tensor cores' own rounding


class Tiling(NamedTuple):
    """Launch shape. A program streams blocks_per_program blocks of block_p state rows each."""

    block_p: int
    blocks_per_program: int
    num_warps: int
    num_stages: int
    max_registers: int = 0  # a thread; 0: the compiler's choice


@triton.jit
def _tf32_part(value):
    """value rounded to tf32's 10 stored mantissa bits."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, A_EXACT: tl.constexpr, B_EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """a @ b in float32 accuracy; A_EXACT, B_EXACT: that operand is a 16-bit float. NATIVE: 16-bit products allowed."""
    if NATIVE and A_EXACT and B_EXACT and a.dtype == b.dtype:
        return tl.dot(a, b)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if A_EXACT and B_EXACT:
        result = tl.dot(a, b, input_precision="tf32")
    elif B_EXACT:
        high = _tf32_part(a)
        result = tl.dot(a - high, b, input_precision="tf32")
        result = tl.dot(high, b, result, input_precision="tf32")
    elif A_EXACT:
        high = _tf32_part(b)
        result = tl.dot(a, b - high, input_precision="tf32")
        result = tl.dot(a, high, result, input_precision="tf32")
    else:
        result = tl.dot(a, b, input_precision="tf32x3")
    return result


@triton.jit
def _path_mask(ancestors_row, node, N: tl.constexpr):
    """Bits of each node's ancestors and of the node itself."""
    mask = tl.load(ancestors_row + node, mask=node < N, other=0)
    if N <= 32:
        mask = mask.to(tl.int32)
    return mask | (tl.full((), 1, mask.dtype) << node.to(mask.dtype))


@triton.jit
def _has_bit(mask, bit):
    return ((mask >> bit.to(mask.dtype)) & 1) != 0


@triton.jit
def _node_dt(dt_row, node, stride_dt, bias, N: tl.constexpr, SOFTPLUS: tl.constexpr):
    """Step sizes after bias and softplus; 0 beyond the nodes."""
    dt = tl.load(dt_row + node * stride_dt, mask=node < N, other=0.0).to(tl.float32) + bias
    if SOFTPLUS:
        dt = softplus_rn(dt)
    return tl.where(node < N, dt, 0.0)


@triton.jit
def _emit_block(
    output,
    dim,
    dim_inside,
    nodes,
    waiting,
    inputs,
    N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    INPUTS_EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Outputs y[dim, node_i] of one block of state rows; appends the nodes' x of these rows to the window.

    nodes, waiting: coefficients of the nodes' and (BLOCK_W > 0) of the pending tokens' x, and where these are. inputs:
    this head's x, z, y and window, and their strides.
    """
    coefficient, node_i, node_j, append, free = nodes
    x_head, y_head, window_x_head, stride_x, stride_y, stride_wx_pos = inputs
    x_nodes = tl.load(
        x_head + node_j[None, :] * stride_x + dim[:, None], mask=(node_j < N)[None, :] & dim_inside, other=0.0
    )
    tl.store(
        window_x_head + append[None, :] * stride_wx_pos + dim[:, None],
        x_nodes.to(window_x_head.dtype.element_ty),
        mask=free[None, :] & dim_inside,
    )
    output += _dot(x_nodes, coefficient, INPUTS_EXACT, False, NATIVE)
    if BLOCK_W > 0:
        coefficient_w, position, is_waiting = waiting
        x_waiting = tl.load(
            window_x_head + position[None, :] * stride_wx_pos + dim[:, None],
            mask=is_waiting[None, :] & dim_inside,
            other=0.0,
        )
        output += _dot(x_waiting, coefficient_w, INPUTS_EXACT, False, NATIVE)
    out_inside = (node_i < N)[None, :] & dim_inside
    tl.store(y_head + node_i[None, :] * stride_y + dim[:, None], output.to(y_head.dtype.element_ty), mask=out_inside)


@triton.jit
def _stream_blocks(
    checkpoint_head,
    first_block,
    dim_p,
    C_parts,
    state_decay,
    nodes,
    waiting,
    inputs,
    N: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    IS_KV: tl.constexpr,
    INPUTS_EXACT: tl.constexpr,
    STATE_EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """All blocks of a state that is not folded, lying as [dstate, headdim] if IS_KV: see _emit_block."""
    for block in range(first_block, first_block + BLOCKS):
        dim = block * BLOCK_P + dim_p
        dim_inside = inside(dim, HEADDIM, HEADDIM % (BLOCK_P * BLOCKS) == 0)
        output = tl.zeros((BLOCK_P, BLOCK_I), tl.float32)
        for part in tl.static_range(BLOCK_S // PART):
            part_column = part * PART + tl.arange(0, PART)
            if IS_KV:
                tile = checkpoint_head + part_column[None, :] * HEADDIM + dim[:, None]
            else:
                tile = checkpoint_head + dim[:, None] * DSTATE + part_column[None, :]
            state = tl.load(
                tile,
                mask=dim_inside[:, None] & inside(part_column, DSTATE, DSTATE == BLOCK_S)[None, :],
                other=0.0,
            )
            output += _dot(state, C_parts[part], STATE_EXACT, INPUTS_EXACT, NATIVE)
        output *= state_decay[None, :]
        _emit_block(output, dim, dim_inside[:, None], nodes, waiting, inputs, N, BLOCK_W, INPUTS_EXACT, NATIVE)


@triton.jit
def _mamba2_verify_kernel(
    x,
    dt,
    B,
    C,
    A,
    D,
    dt_bias,
    y,
    checkpoint,
    axis_order,
    slots,
    rows,
    pending,
    order,
    window_x,
    window_B,
    window_dt,
    ancestors,
    schedule,
    fold_threshold,
    stride_x,
    stride_dt,
    stride_dt_head,
    stride_B,
    stride_C,
    stride_A,
    stride_D,
    stride_bias,
    stride_y,
    stride_checkpoint_slot,
    stride_checkpoint_head,
    stride_wx_row,
    stride_wx_pos,
    stride_wB_row,
    stride_wB_pos,
    stride_wdt_row,
    stride_wdt_pos,
    N: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    HAS_SCHEDULE: tl.constexpr,
    EITHER: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    INPUTS_EXACT: tl.constexpr,
    STATE_EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    if HAS_SCHEDULE:
        b = tl.load(schedule + b).to(tl.int64)
    first_block = tl.program_id(1) * BLOCKS
    group = head // HEADS_PER_GROUP
    slot = tl.load(slots + b).to(tl.int64)
    node_i = tl.arange(0, BLOCK_I)
    dim_p = tl.arange(0, BLOCK_P)
    y_head = y + b * N * stride_y + head * HEADDIM
    if slot <= 0:
        for block in range(first_block, first_block + BLOCKS):
            dim = block * BLOCK_P + dim_p
            tl.store(
                y_head + node_i[None, :] * stride_y + dim[:, None],
                tl.zeros((BLOCK_P, BLOCK_I), y.dtype.element_ty),
                mask=(node_i < N)[None, :] & (dim < HEADDIM)[:, None],
            )
        return

    row = tl.load(rows + b).to(tl.int64)
    before = tl.load(pending + slot)
    folds = before > fold_threshold
    waiting = tl.where(folds, 0, before)
    order_row = order + row * CAPACITY
    decay_rate = tl.load(A + head * stride_A).to(tl.float32)
    column = tl.arange(0, BLOCK_S)
    state_inside = inside(column, DSTATE, DSTATE == BLOCK_S)
    covered: tl.constexpr = HEADDIM % (BLOCK_P * BLOCKS) == 0
    window_x_head = window_x + row * stride_wx_row + head * HEADDIM
    window_B_group = window_B + row * stride_wB_row + group * DSTATE
    window_dt_head = window_dt + row * stride_wdt_row + head
    checkpoint_head = checkpoint + slot * stride_checkpoint_slot + head * stride_checkpoint_head
    is_kv = False
    if EITHER:
        is_kv = tl.load(axis_order + slot) == IS_KV
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias + head * stride_bias).to(tl.float32)

    # the nodes: coefficients [node_j, node_i] of x_j in y_i
    node_j = tl.arange(0, BLOCK_J)
    is_node = node_j < N
    dt_row = dt + b * N * stride_dt + head * stride_dt_head
    dt_j = _node_dt(dt_row, node_j, stride_dt, bias, N, SOFTPLUS)
    path_i = _path_mask(ancestors + b * N, node_i, N)
    path_j = _path_mask(ancestors + b * N, node_j, N)
    on_path = _has_bit(path_i[None, :], node_j[:, None]) & is_node[:, None]
    # in float64 a difference of cumulated decays is as good as the sum of the decays between
    log_decay = (decay_rate * dt_j).to(tl.float64)
    total_i = tl.sum(tl.where(on_path, log_decay[:, None], 0.0), axis=0)
    total_j = tl.sum(tl.where(_has_bit(path_j[:, None], node_j[None, :]), log_decay[None, :], 0.0), axis=1)
    log_decay_ji = (total_i[None, :] - total_j[:, None]).to(tl.float32)
    log_decay_i = total_i.to(tl.float32)

    C_parts = ()  # [PART, node_i] each
    scores = tl.zeros((BLOCK_J, BLOCK_I), tl.float32)
    for part in tl.static_range(BLOCK_S // PART):
        part_column = part * PART + tl.arange(0, PART)
        part_inside = inside(part_column, DSTATE, DSTATE == BLOCK_S)
        C_part = tl.load(
            C + (b * N + node_i)[None, :] * stride_C + group * DSTATE + part_column[:, None],
            mask=(node_i < N)[None, :] & part_inside[:, None],
            other=0.0,
        )
        B_part = tl.load(
            B + (b * N + node_j)[:, None] * stride_B + group * DSTATE + part_column[None, :],
            mask=is_node[:, None] & part_inside[None, :],
            other=0.0,
        )
        scores += _dot(B_part, C_part, INPUTS_EXACT, INPUTS_EXACT, NATIVE)
        C_parts = C_parts + (C_part,)  # noqa: RUF005 (jit code has no unpacking)
    coefficient = tl.where(on_path, scores * tl.exp(tl.where(on_path, log_decay_ji, 0.0)) * dt_j[:, None], 0.0)
    if HAS_D:
        skip = tl.load(D + head * stride_D).to(tl.float32)
        coefficient += tl.where((node_j[:, None] == node_i[None, :]) & is_node[:, None], skip, 0.0)

    # append the nodes behind the pending tokens; nobody reads these positions in this launch
    entry = before + node_j
    free = is_node & (entry < CAPACITY)
    append = tl.load(order_row + entry, mask=free, other=0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(window_dt + row * stride_wdt_row + append * stride_wdt_pos + head, dt_j, mask=free)
        if head % HEADS_PER_GROUP == 0:
            tl.store(
                window_B + row * stride_wB_row + append[:, None] * stride_wB_pos + group * DSTATE + column[None, :],
                tl.load(
                    B + (b * N + node_j)[:, None] * stride_B + group * DSTATE + column[None, :],
                    mask=is_node[:, None] & state_inside[None, :],
                    other=0.0,
                ).to(window_B.dtype.element_ty),
                mask=free[:, None] & state_inside[None, :],
            )

    # the pending tokens: coefficients [token_w, node_i]
    if BLOCK_W > 0:
        token_w = tl.arange(0, BLOCK_W)
        is_waiting = token_w < waiting
        position = tl.load(order_row + token_w, mask=is_waiting, other=0).to(tl.int64)
        dt_w = tl.load(window_dt_head + position * stride_wdt_pos, mask=is_waiting, other=0.0)
        follows = token_w + 1 < waiting
        next_position = tl.load(order_row + token_w + 1, mask=follows, other=0).to(tl.int64)
        next_dt = tl.load(window_dt_head + next_position * stride_wdt_pos, mask=follows, other=0.0)
        after_w = tl.cumsum(decay_rate * next_dt, axis=0, reverse=True)
        scores_w = tl.zeros((BLOCK_W, BLOCK_I), tl.float32)
        for part in tl.static_range(BLOCK_S // PART):
            part_column = part * PART + tl.arange(0, PART)
            part_inside = inside(part_column, DSTATE, DSTATE == BLOCK_S)
            B_part = tl.load(
                window_B_group + position[:, None] * stride_wB_pos + part_column[None, :],
                mask=is_waiting[:, None] & part_inside[None, :],
                other=0.0,
            )
            scores_w += _dot(B_part, C_parts[part], INPUTS_EXACT, INPUTS_EXACT, NATIVE)
        coefficient_w = scores_w * tl.exp(after_w[:, None] + log_decay_i[None, :]) * dt_w[:, None]
        state_decay = tl.exp(tl.sum(decay_rate * dt_w, axis=0) + log_decay_i)
        waiting_w = (coefficient_w, position, is_waiting)
    else:
        state_decay = tl.exp(log_decay_i)
        waiting_w = ()

    x_head = x + b * N * stride_x + head * HEADDIM
    nodes = (coefficient, node_i, node_j, append, free)
    inputs = (x_head, y_head, window_x_head, stride_x, stride_y, stride_wx_pos)
    if folds:
        for block in range(first_block, first_block + BLOCKS):
            dim = block * BLOCK_P + dim_p
            in_vk = checkpoint_head + dim[:, None] * DSTATE + column[None, :]
            in_kv = checkpoint_head + column[None, :] * HEADDIM + dim[:, None]
            dim_inside = inside(dim, HEADDIM, covered)
            tile_inside = dim_inside[:, None] & state_inside[None, :]
            window = (
                order_row,
                window_x_head + dim,
                window_B_group + column[None, :],
                window_dt_head,
                stride_wx_pos,
                stride_wB_pos,
                stride_wdt_pos,
                dim_inside,
                state_inside[None, :],
            )
            state = load_state(in_vk, in_kv, tile_inside, is_kv, EITHER)
            state = replay_tokens(state, before, decay_rate, window).to(checkpoint.dtype.element_ty)
            store_state(in_vk, in_kv, state, tile_inside, is_kv, EITHER)
            # loaded here: kept from above, it would crowd the replay's registers
            C_tile = tl.load(
                C + (b * N + node_i)[None, :] * stride_C + group * DSTATE + column[:, None],
                mask=(node_i < N)[None, :] & state_inside[:, None],
                other=0.0,
            )
            output = _dot(state, C_tile, STATE_EXACT, INPUTS_EXACT, NATIVE) * state_decay[None, :]
            # no pending tokens are left: BLOCK_W = 0
            _emit_block(output, dim, dim_inside[:, None], nodes, (), inputs, N, 0, INPUTS_EXACT, NATIVE)
    elif EITHER and is_kv:
        _stream_blocks(
            checkpoint_head,
            first_block,
            dim_p,
            C_parts,
            state_decay,
            nodes,
            waiting_w,
            inputs,
            N,
            HEADDIM,
            DSTATE,
            True,
            INPUTS_EXACT,
            STATE_EXACT,
            NATIVE,
            BLOCK_I,
            BLOCK_W,
            BLOCK_P,
            BLOCK_S,
            PART,
            BLOCKS,
        )
    else:
        _stream_blocks(
            checkpoint_head,
            first_block,
            dim_p,
            C_parts,
            state_decay,
            nodes,
            waiting_w,
            inputs,
            N,
            HEADDIM,
            DSTATE,
            False,
            INPUTS_EXACT,
            STATE_EXACT,
            NATIVE,
            BLOCK_I,
            BLOCK_W,
            BLOCK_P,
            BLOCK_S,
            PART,
            BLOCKS,
        )


def default_tiling(headdim: int, dstate: int, nodes: int, batch: int, nheads: int) -> Tiling:
    """A warp a program streams a head in blocks of 16 rows, two blocks ahead; few programs: one block each.

    Wider states and trees take more warps, so that nothing spills.
    """
    warps = (2 if dstate > 128 else 1) * (2 if nodes > 16 else 1)
    if batch * nheads < 512:
        return Tiling(16, 1, warps, 1)
    return Tiling(16, triton.cdiv(headdim, 16), warps, 3)


def mamba2_verify(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
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
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Outputs of the B trees of N nodes; returns y [B*N, H, P] in x's dtype (or `out`, written in place).

    x           [B*N, H, P] float, last two dimensions contiguous, any token stride: read.
    dt          [B*N, H] float, any strides, or expanded to [B*N, H, P]: raw, read.
    B, C        [B*N, G, D] of x's dtype, last two dimensions contiguous, any token stride: read.
    A, D, dt_bias
                [H] float, or expanded to [H, P(, D)] with stride 0; D and dt_bias may be None.
    dt_softplus whether the step size is softplus(dt + dt_bias), or dt + dt_bias.
    states      one layer's, [S, H, P, D]: read at the slots; written, as they lie, where pending > fold_threshold.
    rows        with ancestors. Padding (slot <= 0): y zero, nothing else written.
    window      one layer's, x and B of x's dtype: pending entries read, order[row, pending .. pending + N) written.
    out         [B*N, H, P] float, last two dimensions contiguous, any token stride.
    tiling      launch shape, None for the default.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    dt, A, D, dt_bias = parameters(dt, A, D, dt_bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    sizes = check(
        slots=Arg(rows.slots, "B"),
        rows=Arg(rows.rows, "B"),
        ancestors=Arg(rows.ancestors, ">=B N"),
        schedule=Arg(rows.schedule, ">=B"),
        x=Arg(x, "B*N H P", FLOATS, contiguous=2),
        dt=Arg(dt, "B*N H", FLOATS, contiguous=0),
        B=Arg(B, "B*N G D", x.dtype, contiguous=2),
        C=Arg(C, "B*N G D", x.dtype, contiguous=2),
        A=Arg(A, "H", FLOATS, contiguous=0),
        D=Arg(D, "H", FLOATS, contiguous=0),
        dt_bias=Arg(dt_bias, "H", FLOATS, contiguous=0),
        states=Arg(states.data, "S H P D", FLOATS, contiguous=2),
        axis_order=Arg(states.axis_order, "S"),
        pending=Arg(window.pending, "S"),
        order=Arg(window.order, "R C"),
        window_x=Arg(window.x, "R C H P", x.dtype, contiguous=2),
        window_B=Arg(window.B, "R C G D", x.dtype, contiguous=2),
        window_dt=Arg(window.dt, "R C H", torch.float32),
        out=Arg(y, "B*N H P", FLOATS, contiguous=2),
    )
    batch, nodes, nheads, headdim, ngroups, dstate = sizes.get_all("B N H P G D")
    check_sizes(nodes, nheads, ngroups, dstate)
    window.check_room(nodes)
    if batch == 0:
        return y
    tiling = tiling or default_tiling(headdim, dstate, nodes, batch, nheads)
    node_block = triton.next_power_of_2(nodes)
    grid = launch_grid(batch * nheads, triton.cdiv(headdim, tiling.block_p * tiling.blocks_per_program))
    _mamba2_verify_kernel[grid](
        x, dt, B, C, A, D, dt_bias, y, states.data, states.axis_order, rows.slots, rows.rows, window.pending,
        window.order, window.x, window.B, window.dt, rows.ancestors, rows.schedule, window.fold_threshold,
        x.stride(0), dt.stride(0), dt.stride(1), B.stride(0), C.stride(0), A.stride(0),
        0 if D is None else D.stride(0), 0 if dt_bias is None else dt_bias.stride(0), y.stride(0),
        states.data.stride(0), states.data.stride(1), window.x.stride(0), window.x.stride(1), window.B.stride(0),
        window.B.stride(1), window.dt.stride(0), window.dt.stride(1),
        N=nodes,
        CAPACITY=window.order.shape[1],
        HEADS=nheads,
        HEADS_PER_GROUP=nheads // ngroups,
        HEADDIM=headdim,
        DSTATE=dstate,
        HAS_SCHEDULE=rows.schedule is not None,
        EITHER=states.axis_order is not None,
        HAS_D=D is not None,
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        INPUTS_EXACT=x.dtype != torch.float32,
        STATE_EXACT=states.data.dtype != torch.float32,
        NATIVE=not triton.knobs.runtime.interpret,  # the interpreter multiplies bfloat16 as integers
        BLOCK_I=max(8, node_block),
        BLOCK_J=max(16, node_block),
        BLOCK_W=max(16, triton.next_power_of_2(window.fold_threshold)) if window.fold_threshold else 0,
        BLOCK_P=tiling.block_p,
        BLOCK_S=triton.next_power_of_2(dstate),
        PART=min(PART, triton.next_power_of_2(dstate)),
        BLOCKS=tiling.blocks_per_program,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **({"maxnreg": tiling.max_registers} if tiling.max_registers else {}),
    )  # fmt: skip
    return y
