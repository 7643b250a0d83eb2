"""Depthwise causal convolution of a verify in slots mode: the window after each node goes to the node's own slot.

    y_i      = act(bias + sum_j weight[:, K-1-j] * u_{i,j}),   u_{i,0} = x_i, u_{i,j} = input of i's j-th ancestor,
               and beyond the root the window conv_states[read_slot], newest entry first
    window_i = u_{i,K-2} .. u_{i,0},   to conv_states[write_slots[b, i]]

Bit for bit SGLang's causal_conv1d_update (Triton) in a verify and its intermediate_conv_window: rounding as in taps.py,
bias first, then a chain's taps from the oldest to the newest and a tree's from the newest to the oldest. Unlike stock
the slot that is read keeps its window, unless it is one of the slots to write (in slots mode it is the root's).

Shapes: x, y [T, dim], token b*N+i is node i of batch row b; conv_states [S, dim, K-1], oldest entry first, any
strides. A program owns BLOCK_D channels of all nodes of a row, as a tile [nodes, channels] for y and as a tile
[nodes, channels * entries] for the windows, so that neighbouring threads write neighbouring elements; it has loaded
everything before it stores anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.grid import launch_grid
from ..common.operands import NodeSlots
from .options import check_width, has_silu
from .taps import above, activated, add_tap

TILE = 512  # (node, channel) pairs of a program
MIN_CHANNELS = 32  # a warp's worth: narrower loads waste memory sectors


@triton.jit
def _steps_up(j: tl.constexpr, nodes_up, ages):
    return nodes_up[j], ages[j]


@triton.jit
def _load_inputs(up, age, channel, inside, x_row, old_row, stride_x, stride_state_dim, stride_tok, K: tl.constexpr):
    """Input of node `up` where it is one, and entry `age` of the old window, counted from the newest, elsewhere."""
    tree = tl.load(x_row + up.to(tl.int64) * stride_x + channel, mask=inside & (up >= 0), other=0.0)
    from_old = old_row + channel.to(tl.int64) * stride_state_dim + (K - 2 - age) * stride_tok
    return tree, tl.load(from_old, mask=inside & (up < 0), other=0.0)


@triton.jit
def _conv1d_verify_slots_kernel(
    x,
    y,
    conv_states,
    weight,
    bias,
    read_slots,
    write_slots,
    parents,
    stride_x,
    stride_state_slot,
    stride_state_dim,
    stride_tok,
    stride_weight,
    DIM: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_TREE: tl.constexpr,
    SILU: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first_channel = tl.program_id(1) * BLOCK_D
    node = tl.arange(0, BLOCK_N)[:, None]
    channel = first_channel + tl.arange(0, BLOCK_D)[None, :]
    inside = (node < N) & (channel < DIM)
    y_tile = y + (b * N + node) * DIM + channel
    read_slot = tl.load(read_slots + b).to(tl.int64)
    if read_slot <= 0:
        tl.store(y_tile, tl.zeros((BLOCK_N, BLOCK_D), y.dtype.element_ty), mask=inside)
        return
    x_row = x + b * N * stride_x
    old_row = conv_states + read_slot * stride_state_slot

    # nodes_up[j]: the node j steps up, < 0 beyond the root; ages[j]: then its distance from the newest old entry
    if IS_TREE:
        parents_row = parents + b * N
        up1 = above(tl.minimum(node, N - 1), parents_row)
        up2 = above(up1, parents_row)
        up3 = above(up2, parents_row)
    else:
        up1, up2, up3 = tl.maximum(node - 1, -1), tl.maximum(node - 2, -1), tl.maximum(node - 3, -1)
    age2 = tl.where(up1 < 0, 1, 0)
    nodes_up = (node, up1, up2, up3)
    ages = (0, 0, age2, age2 + tl.where(up2 < 0, 1, 0))

    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_BIAS:
        bias_row = tl.load(bias + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        acc = tl.broadcast_to(bias_row, (BLOCK_N, BLOCK_D))
    for tap in tl.static_range(K):
        up, age = _steps_up(tap if IS_TREE else K - 1 - tap, nodes_up, ages)
        tree, old = _load_inputs(up, age, channel, inside, x_row, old_row, stride_x, stride_state_dim, stride_tok, K)
        weights = weight + channel * stride_weight + (K - 1 - tap if IS_TREE else tap)
        acc = add_tap(acc, up, tree, old, tl.load(weights, mask=channel < DIM, other=0.0))
    acc = activated(acc, SILU)

    element = tl.arange(0, BLOCK_E)[None, :]
    entry = element % (K - 1)
    owner = first_channel + element // (K - 1)
    in_window = (node < N) & (element < BLOCK_D * (K - 1)) & (owner < DIM)
    up, age = nodes_up[0], 0
    for j in tl.static_range(1, K - 1):
        up, age = tl.where(entry == K - 2 - j, nodes_up[j], up), tl.where(entry == K - 2 - j, ages[j], age)
    tree, old = _load_inputs(up, age, owner, in_window, x_row, old_row, stride_x, stride_state_dim, stride_tok, K)
    window = tl.where(up >= 0, tree.to(old.dtype), old)
    write_slot = tl.load(write_slots + b * N + node, mask=node < N, other=0).to(tl.int64)
    # the slot read may be written, and an element is read by one thread and written by another
    tl.debug_barrier()
    target = conv_states + write_slot * stride_state_slot + owner.to(tl.int64) * stride_state_dim + entry * stride_tok
    tl.store(target, window, mask=in_window & (write_slot > 0))
    tl.store(y_tile, acc.to(y.dtype.element_ty), mask=inside)


def conv1d_verify_slots(
    x: torch.Tensor,
    *,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    nodes: NodeSlots,
) -> torch.Tensor:
    """Convolve B chains or trees of N nodes and write each node's window; returns y [B*N, dim], contiguous, x's dtype.

    x            [B*N, dim] float, inner contiguous, any token stride: read, raw inputs.
    conv_states  [S, dim, K-1] float, any strides, oldest entry first: read and written at the nodes' slots.
    weight       [dim, K] float, inner contiguous, K in 2..4: read.
    bias         [dim] float: read. None: no bias.
    activation   "silu", "swish" or None.
    nodes        read; write slots and parents contiguous. As in stock, a chain given as a tree may have other last bits
                 than the same chain given as None.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        read_slots=Arg(nodes.read, "B"),
        write_slots=Arg(nodes.write, ">=B N", contiguous=2),
        parents=Arg(nodes.parents, ">=B N", torch.int32, contiguous=2),
        weight=Arg(weight, "dim K", FLOATS),
        bias=Arg(bias, "dim", FLOATS),
        x=Arg(x, "B*N dim", FLOATS),
        conv_states=Arg(conv_states, "S dim K-1", FLOATS, contiguous=0),
    )
    batch, node_count, dim, width = sizes.get_all("B N dim K")
    check_width(width)
    silu = has_silu(activation)
    y = torch.empty((batch * node_count, dim), dtype=x.dtype, device=x.device)
    if batch == 0 or node_count == 0:
        return y
    block_n = triton.next_power_of_2(node_count)
    block_d = min(max(TILE // block_n, MIN_CHANNELS), triton.next_power_of_2(dim))
    _conv1d_verify_slots_kernel[launch_grid(batch, triton.cdiv(dim, block_d))](
        x,
        y,
        conv_states,
        weight,
        bias,
        nodes.read,
        nodes.write,
        nodes.parents,
        x.stride(0),
        conv_states.stride(0),
        conv_states.stride(1),
        conv_states.stride(2),
        weight.stride(0),
        DIM=dim,
        N=node_count,
        K=width,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_E=triton.next_power_of_2(block_d * (width - 1)),
        HAS_BIAS=bias is not None,
        IS_TREE=nodes.parents is not None,
        SILU=silu,
        num_warps=max(4, block_n * block_d // 128),
    )
    return y
