"""Depthwise causal convolution of a draft tree: every node along its own path.

    y_i = act(bias + sum_t weight[:, t] * u_{i, K-1-t}),   u_{i, 0} = x_i, u_{i, j} = input of i's j-th ancestor,
    beyond the root the row's pending tokens, newest first, and beyond these the slot's state conv_states[slot].

Rounding as in taps.py; the sum runs from the bias over the taps from the oldest to the newest. Stock sums a tree's taps
from the newest; ours keep the chain's order for both, so a tree that is a chain gives the chain's bits, and those are
also the bits of stock's one-token decode.

Unlike stock the slot's state is only read: it lags behind its request as the recurrent state does, and moves on where
tokens are folded (fold.py). The nodes' raw inputs go to the window for that purpose.

Shapes: x, y [T, dim], token b*N+i is node i of batch row b; conv_states [S, dim, K-1], oldest entry first, any
strides; window inputs [R, C, dim]. A program owns BLOCK_D channels of NODES consecutive nodes of one row.

Where all rows are chains (rows.chain) a program looks at no links, and loads what its nodes share once: each input is
four nodes' tap. The bits are the tree's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.grid import launch_grid
from ..common.operands import Rows
from .options import check_width, has_silu
from .taps import above, activated, add_tap, product
from .window import ConvWindow

PROGRAMS_WANTED = 4096  # with fewer (row, node, channel block) triples each gets its own program


@triton.jit
def _before_the_root(older, past, inside, K: tl.constexpr):
    """The input `older` steps before the newest one that is committed: a pending token's, or of the slot's state."""
    pending, order_row, window_row, stride_token, state_row, stride_tok = past
    token = pending - 1 - older
    position = tl.load(order_row + tl.maximum(token, 0)).to(tl.int64)
    waiting = tl.load(window_row + position * stride_token, mask=inside & (token >= 0), other=0.0)
    state = tl.load(state_row + (K - 1 + token) * stride_tok, mask=inside & (token < 0), other=0.0)
    return tl.where(token >= 0, waiting.to(state.dtype), state)


@triton.jit
def _add_tap(acc, back: tl.constexpr, node, older, x_row, past, weights, stride_x, inside):
    """acc + weight * input of the tap `back` steps up: of the node, or of `older` < back steps before the root."""
    tree = tl.load(x_row + node.to(tl.int64) * stride_x, mask=inside & (node >= 0), other=0.0)
    old = past[0]
    for steps in tl.static_range(1, back):
        old = tl.where(older == steps, past[steps], old)
    return add_tap(acc, node, tree, old, weights[back])


@triton.jit
def _earlier(first, x_row, past, stride_x, inside, K: tl.constexpr):
    """A chain's inputs before node `first`, K - 1 of them, newest first."""
    earlier = ()
    for back in tl.static_range(1, K):
        node = first - back
        tree = tl.load(x_row + node.to(tl.int64) * stride_x, mask=inside & (node >= 0), other=0.0)
        old = past[0]
        for steps in tl.static_range(1, back):
            old = tl.where(node == -1 - steps, past[steps], old)
        earlier = earlier + (tl.where(node >= 0, tree, old),)  # noqa: RUF005
    return earlier


@triton.jit
def _conv1d_verify_kernel(
    x,
    y,
    conv_states,
    weight,
    bias,
    slots,
    rows,
    parents,
    pending,
    order,
    window_inputs,
    capacity,
    stride_x,
    stride_state_slot,
    stride_state_dim,
    stride_tok,
    stride_weight,
    stride_inputs_row,
    stride_inputs_token,
    DIM: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHAIN: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(2) * NODES
    inside = channel < DIM
    slot = tl.load(slots + b).to(tl.int64)
    y_row = y + b * N * DIM + channel
    if slot <= 0:
        for offset in tl.static_range(NODES):
            node = first + offset
            tl.store(y_row + node * DIM, tl.zeros((BLOCK_D,), y.dtype.element_ty), mask=inside & (node < N))
        return
    row = tl.load(rows + b).to(tl.int64)
    x_row = x + b * N * stride_x + channel
    before = tl.load(pending + slot)
    order_row = order + row * capacity
    window_row = window_inputs + row * stride_inputs_row + channel
    state_row = conv_states + slot * stride_state_slot + channel.to(tl.int64) * stride_state_dim
    weight_col = weight + channel * stride_weight
    parents_row = parents + b * N

    # what every node of the program may ask for: the taps' weights, by steps up, and the inputs before the root
    where = (before, order_row, window_row, stride_inputs_token, state_row, stride_tok)
    past = ()
    weights = ()
    for back in tl.static_range(K):
        weights = weights + (tl.load(weight_col + (K - 1 - back), mask=inside, other=0.0),)  # noqa: RUF005 (jit code)
        if back < K - 1:
            past = past + (_before_the_root(back, where, inside, K),)  # noqa: RUF005 (has no unpacking)
    start = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    # all loads before the first store: the compiler cannot know that they do not overlap
    positions = ()
    own = ()
    outputs = ()
    for offset in tl.static_range(NODES):
        node = first + offset
        positions = positions + (tl.load(order_row + before + node, mask=node < N, other=0).to(tl.int64),)  # noqa: RUF005
        own = own + (tl.load(x_row + node.to(tl.int64) * stride_x, mask=inside & (node < N), other=0.0),)  # noqa: RUF005
    if CHAIN:
        earlier = past if NODES >= N else _earlier(first, x_row, past, stride_x, inside, K)
        for offset in tl.static_range(NODES):
            acc = start
            for back in tl.static_range(K - 1, -1, -1):
                if back <= offset:
                    acc += product(own[offset - back], weights[back])
                else:
                    acc += product(earlier[back - offset - 1], weights[back])
            outputs = outputs + (activated(acc, SILU).to(y.dtype.element_ty),)  # noqa: RUF005
    else:
        for offset in tl.static_range(NODES):
            node = first + offset
            here = inside & (node < N)
            node1 = tl.where(node < N, above(tl.minimum(node, N - 1), parents_row), -1)
            node2 = above(node1, parents_row)
            older2 = tl.where(node1 < 0, 1, 0)
            node3 = above(node2, parents_row)
            older3 = older2 + tl.where(node2 < 0, 1, 0)
            acc = start
            if K >= 4:
                acc = _add_tap(acc, 3, node3, older3, x_row, past, weights, stride_x, here)
            if K >= 3:
                acc = _add_tap(acc, 2, node2, older2, x_row, past, weights, stride_x, here)
            acc = _add_tap(acc, 1, node1, 0, x_row, past, weights, stride_x, here)
            acc += product(own[offset], weights[0])
            outputs = outputs + (activated(acc, SILU).to(y.dtype.element_ty),)  # noqa: RUF005
    for offset in tl.static_range(NODES):
        node = first + offset
        here = inside & (node < N)
        tl.store(y_row + node * DIM, outputs[offset], mask=here)
        stored = own[offset].to(window_inputs.dtype.element_ty)
        tl.store(window_row + positions[offset] * stride_inputs_token, stored, mask=here)


def conv1d_verify(
    x: torch.Tensor,
    *,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    rows: Rows,
    window: ConvWindow,
) -> torch.Tensor:
    """Convolve the B trees of N nodes each; returns y [B*N, dim] in x's dtype, contiguous.

    x            [B*N, dim] float, inner contiguous, any token stride: read, raw inputs.
    conv_states  [S, dim, K-1] float, any strides, oldest entry first: read at the slots.
    weight       [dim, K] float, inner contiguous, K in 2..4: read.
    bias         [dim] float: read. None: no bias.
    activation   "silu", "swish" or None.
    rows         slots, rows and parents (of chains their shape alone) are read; outputs of padding are zero.
    window       of one layer: at the rows, the newest pending tokens' inputs are read, and node i's are written to
                 order[r, pending + i].

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        slots=Arg(rows.slots, "B"),
        parents=Arg(rows.parents, ">=B N"),
        weight=Arg(weight, "dim K", FLOATS),
        bias=Arg(bias, "dim", FLOATS),
        x=Arg(x, "B*N dim", FLOATS),
        conv_states=Arg(conv_states, "S dim K-1", FLOATS, contiguous=0),
        pending=Arg(window.pending, "S"),
        order=Arg(window.order, "R C"),
        **window.inputs_as("R C"),
    )
    batch, nodes, dim, width, capacity = sizes.get_all("B N dim K C")
    check_width(width)
    window.check_room(nodes)
    silu = has_silu(activation)
    y = torch.empty((batch * nodes, dim), dtype=x.dtype, device=x.device)
    if batch == 0:
        return y
    block = min(256, triton.next_power_of_2(dim))
    blocks = triton.cdiv(dim, block)
    # (a choice between inputs of two types is one between two sums)
    chain = rows.chain and x.dtype == conv_states.dtype
    # few programs: latency counts, each node has its own; many: share weights among some nodes, and a chain's inputs
    shared = min(triton.next_power_of_2(nodes), 8 if chain else 4)
    per_program = shared if batch * blocks * nodes >= PROGRAMS_WANTED else 1
    _conv1d_verify_kernel[launch_grid(batch, blocks, triton.cdiv(nodes, per_program))](
        x,
        y,
        conv_states,
        weight,
        bias,
        rows.slots,
        rows.rows,
        rows.parents,
        window.pending,
        window.order,
        window.inputs,
        capacity,
        x.stride(0),
        conv_states.stride(0),
        conv_states.stride(1),
        conv_states.stride(2),
        weight.stride(0),
        window.inputs.stride(0),
        window.inputs.stride(1),
        DIM=dim,
        N=nodes,
        K=width,
        NODES=per_program,
        BLOCK_D=block,
        HAS_BIAS=bias is not None,
        SILU=silu,
        CHAIN=chain,
        num_warps=2,
    )
    return y
