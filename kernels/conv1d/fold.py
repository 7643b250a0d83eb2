"""The convolution's half of a fold: the K-1 inputs before a slot's checkpoint move on with it, in all layers at once.

    state(count) = the K-1 newest of (conv_states[src], inputs of the first `count` pending tokens)

Where a verify folds (common/pending.py), the recurrent states move on in the verify itself, layer by layer, and the
convolution's once for all layers with the commit (`commit_conv`). That asks the step's plan alone, which a commit of
the window (common/window.py) leaves as it is: the two run side by side. Where something else folds, both states move on
together (`fold_conv`): settle, snapshot, state at a length.

Shapes: conv_states [L, S, dim, K-1], oldest entry first, any strides; inputs [L, R, C, dim]. A program owns some
channels of one layer and batch row; it has read what it needs before it writes. Most programs of a commit find that
their row does not fold: they are small, so that many run at once. Where entries lie as SGLang's pools have them, three
of 16 bits to a channel, they are written as words of four channels (words.py): one by one, every entry would touch the
memory of all three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.dependent import has_dependent_launch, wait_then_let_go
from ..common.grid import launch_grid
from ..common.operands import Folds, Rows
from ..common.plan import NEWEST, planned
from .history import inputs_before
from .options import check_width
from .window import ConvWindow
from .words import TAPS, WORD, inputs_before_in_words, store_words

BLOCK_CHANNELS = 512  # four a thread


@triton.jit
def is_last_program():
    """Of a launch along two axes."""
    return (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1)


@triton.jit(do_not_specialize=["src_slots", "dst_slots", "rows", "counts"])
def _fold_conv_kernel(
    conv_states,
    inputs,
    order,
    plan,
    src_slots,
    dst_slots,
    rows,
    counts,
    capacity,
    stride_state_layer,
    stride_state_slot,
    stride_state_dim,
    stride_tok,
    stride_plan,
    stride_inputs_layer,
    stride_inputs_row,
    stride_inputs_token,
    DIM: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """BESIDE: launched behind the window's commit, which has waited for all before it: nothing here touches what that
    writes. But whoever waits for this kernel waits for that too, so one of its programs does, the last to start."""
    if not BESIDE:
        wait_then_let_go(OVERLAP)
    elif is_last_program():
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    block = tl.program_id(0) % blocks
    b = (tl.program_id(0) // blocks).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if plan is not None:
        root, src, row, _, count = planned(plan, b, stride_plan)
        dst = src
        if count <= 0:
            return
        order_row = root - NEWEST - count
    else:
        src = tl.load(src_slots + b).to(tl.int64)
        dst = tl.load(dst_slots + b).to(tl.int64)
        count = tl.maximum(tl.load(counts + b).to(tl.int32), 0)
        if (src <= 0) | (dst <= 0) | ((count == 0) & (src == dst)):
            return
        # a plain copy reads no window, and its row may be garbage
        row = tl.load(rows + b, mask=count > 0, other=0).to(tl.int64)
        order_row = order + row * capacity
    source = conv_states + layer * stride_state_layer + src * stride_state_slot
    target = conv_states + layer * stride_state_layer + dst * stride_state_slot
    window = inputs + layer * stride_inputs_layer + row * stride_inputs_row
    if WORDS:
        word = block * (BLOCK_D // WORD) + tl.arange(0, BLOCK_D // WORD)
        inside = word < DIM // WORD
        found = inputs_before_in_words((count, order_row, window, stride_inputs_token, source), word, inside)
        # an entry is read by one thread and written by another
        tl.debug_barrier()
        store_words(target, found, word, inside)
    else:
        channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = channel < DIM
        at = channel.to(tl.int64) * stride_state_dim
        where = (count, order_row, window, stride_inputs_token, source + at, stride_tok)
        found = inputs_before(where, channel, inside, K)
        tl.debug_barrier()
        for older in tl.static_range(K - 1):
            tl.store(target + at + (K - 2 - older) * stride_tok, found[older], mask=inside)


def _in_words(conv_states: torch.Tensor, inputs: torch.Tensor) -> bool:
    """Whether states are three entries of 16 bits a channel without gaps, and they and inputs can be read four channels
    at a time."""
    dim, taps = conv_states.shape[2:]
    one_type = conv_states.dtype == inputs.dtype and inputs.itemsize == 2
    strides = (*conv_states.stride()[:2], *inputs.stride()[:3], dim)
    aligned = all(tensor.data_ptr() % 8 == 0 for tensor in (conv_states, inputs))
    packed = taps == TAPS.value and conv_states.stride()[2:] == (taps, 1)
    return one_type and packed and aligned and all(stride % WORD.value == 0 for stride in strides)


def _launch(
    conv_states: torch.Tensor,
    window: ConvWindow,
    rows: Rows | None,
    folds: Folds | None,
    beside: bool = False,
) -> None:
    """Of rows that a verify has folded, or of these folds."""
    plan = None if rows is None else rows.plan_for()
    indices = (None,) * 4 if folds is None else (folds.src, folds.dst, folds.rows, folds.counts)
    sizes = check(
        conv_states=Arg(conv_states, "L S dim taps", FLOATS, contiguous=0),
        plan=Arg(plan, "B _"),
        src_slots=Arg(indices[0], "B"),
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
    _fold_conv_kernel[launch_grid(batch * triton.cdiv(dim, block), layers)](
        conv_states,
        window.inputs,
        window.order if plan is None else None,
        plan,
        *indices,
        capacity,
        conv_states.stride(0),
        conv_states.stride(1),
        conv_states.stride(2),
        conv_states.stride(3),
        0 if plan is None else plan.stride(0),
        window.inputs.stride(0),
        window.inputs.stride(1),
        window.inputs.stride(2),
        DIM=dim,
        K=taps + 1,
        BLOCK_D=block,
        WORDS=_in_words(conv_states, window.inputs),
        OVERLAP=overlap,
        BESIDE=overlap and beside,
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
    _launch(conv_states, window, None, folds)


def commit_conv(conv_states: torch.Tensor, window: ConvWindow, rows: Rows, *, after_commit: bool = False) -> None:
    """Fold in place what the verify of these rows has folded of their recurrent states. One launch, no host read.

    conv_states   [L, S, dim, K-1] float, any strides, oldest entry first, K in 2..4: read and written at the slots.
    window        of all layers: inputs are read, where the plan says.
    rows          the plan of that verify is read.
    after_commit  the kernel launched before this one on the stream is `window.commit_window`: need not have ended.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device, and without a plan.
    """
    _launch(conv_states, window, rows, None, after_commit)
