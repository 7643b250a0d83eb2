"""The convolution's half of a fold: the K-1 inputs before a slot's checkpoint move on with it, in all layers at once.

    state(count) = the K-1 newest of (conv_states[src], inputs of the first `count` pending tokens)

Where a verify folds (common/pending.py), the recurrent states move on in the verify itself, layer by layer, and the
convolution's once for all layers with the commit (`commit_conv`, before common/window.py moves the order). Where
something else folds, both move on together (`fold_conv`): settle, snapshot, state at a length.

Shapes: conv_states [L, S, dim, K-1], oldest entry first, any strides; inputs [L, R, C, dim]. A program owns BLOCK_D
channels of one layer and batch row; it has read what it needs before it writes. Most programs of a commit find that
their row does not fold: they are small, so that many run at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.dependent import has_dependent_launch, wait_then_let_go
from ..common.grid import launch_grid
from ..common.operands import Folds, Rows
from ..common.pending import pending_and_folding
from .history import inputs_before
from .options import check_width
from .window import ConvWindow

BLOCK_CHANNELS = 512  # four a thread


@triton.jit(do_not_specialize=["src_slots", "dst_slots", "rows", "counts"])
def _fold_conv_kernel(
    conv_states,
    inputs,
    order,
    pending,
    newest,
    src_slots,
    dst_slots,
    rows,
    counts,
    fold_threshold,
    fold_at_once,
    capacity,
    stride_state_layer,
    stride_state_slot,
    stride_state_dim,
    stride_tok,
    stride_inputs_layer,
    stride_inputs_row,
    stride_inputs_token,
    DIM: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_then_let_go(OVERLAP)
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    b = (tl.program_id(0) // blocks).to(tl.int64)
    src = tl.load(src_slots + b).to(tl.int64)
    dst = tl.load(dst_slots + b).to(tl.int64)
    if (src <= 0) | (dst <= 0):
        return
    if counts is None:
        _, count = pending_and_folding(pending, newest, src, fold_threshold, fold_at_once)
    else:
        count = tl.load(counts + b).to(tl.int32)
    if (count <= 0) & (src == dst):
        return
    # a plain copy reads no window, and its row may be garbage
    row = tl.load(rows + b, mask=count > 0, other=0).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channel < DIM
    layer = tl.program_id(1).to(tl.int64)
    states = conv_states + layer * stride_state_layer + channel.to(tl.int64) * stride_state_dim
    window = inputs + layer * stride_inputs_layer + row * stride_inputs_row
    source = states + src * stride_state_slot
    where = (tl.maximum(count, 0), order + row * capacity, window, stride_inputs_token, source, stride_tok)
    found = inputs_before(where, channel, inside, K)
    # an entry is read by one thread and written by another
    tl.debug_barrier()
    target = states + dst * stride_state_slot
    for older in tl.static_range(K - 1):
        tl.store(target + (K - 2 - older) * stride_tok, found[older], mask=inside)


def _launch(
    conv_states: torch.Tensor,
    window: ConvWindow,
    src: torch.Tensor,
    dst: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    sizes = check(
        src_slots=Arg(src, "B"),
        conv_states=Arg(conv_states, "L S dim taps", FLOATS, contiguous=0),
        pending=Arg(window.pending, "S"),
        order=Arg(window.order, "R C"),
        **window.inputs_as("L R C"),
    )
    batch, layers, dim, taps, capacity = sizes.get_all("B L dim taps C")
    check_width(taps + 1)
    if batch == 0 or layers == 0:
        return
    overlap = has_dependent_launch(conv_states.device)
    block = min(BLOCK_CHANNELS, triton.next_power_of_2(dim))
    _fold_conv_kernel[launch_grid(triton.cdiv(dim, block) * batch, layers)](
        conv_states,
        window.inputs,
        window.order,
        window.pending,
        window.newest,
        src,
        dst,
        rows,
        counts,
        window.fold_threshold,
        window.fold_at_once,
        capacity,
        conv_states.stride(0),
        conv_states.stride(1),
        conv_states.stride(2),
        conv_states.stride(3),
        window.inputs.stride(0),
        window.inputs.stride(1),
        window.inputs.stride(2),
        DIM=dim,
        K=taps + 1,
        BLOCK_D=block,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


def fold_conv(conv_states: torch.Tensor, window: ConvWindow, folds: Folds) -> None:
    """Fold window tokens onto convolution states, in all layers. One launch, no host read.

    conv_states  [L, S, dim, K-1] float, any strides, oldest entry first, K in 2..4: read at the sources, written at the
                 destinations.
    window       of all layers: order and inputs are read.
    folds        read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    _launch(conv_states, window, folds.src, folds.dst, folds.rows, folds.counts)


def commit_conv(conv_states: torch.Tensor, window: ConvWindow, rows: Rows) -> None:
    """Fold in place what the verify of these rows has folded of their recurrent states. One launch, no host read.

    conv_states  [L, S, dim, K-1] float, any strides, oldest entry first, K in 2..4: read and written at the slots.
    window       of all layers, as the verify had it: read, its bookkeeping too.
    rows         slots and rows are read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    _launch(conv_states, window, rows.slots, rows.slots, rows.rows, None)
