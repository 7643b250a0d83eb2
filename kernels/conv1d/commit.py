"""Conv windows after a verify: the last K-1 inputs of the accepted path, for all layers in one launch.

    window(node) = the K-1 newest of (conv_states[slot] before the step, inputs on the path root .. node)

written to the request's slot at the last accepted node, and to the tracked slot at the tracked node. This replaces
SGLang's scatter of per-node windows (fused_conv_window_scatter_with_mask).

Shapes: conv_states [L, S, dim, K-1], oldest entry first, any strides; conv_inputs [L, R, N, dim]. A program owns
BLOCK_D channels of one layer and batch row; it reads the old window before it writes either slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, INDICES, Arg, check
from ..common.grid import launch_grid
from ..common.operands import Rows
from .options import check_width


@triton.jit
def _window(last, parents_row, inputs, state, entry, stride_node, stride_tok, inside, K: tl.constexpr, N: tl.constexpr):
    """The window at node `last` [BLOCK_D, BLOCK_W], oldest entry first; inputs, state [BLOCK_D, 1] point at node 0 and
    entry 0."""
    node = tl.minimum(last, N - 1)
    older = 0
    node_of = tl.full(entry.shape, -1, tl.int32)  # per window entry: its node, or -1 and an entry of the old window
    old_of = tl.zeros(entry.shape, tl.int32)
    for back in tl.static_range(K - 1):
        node_of = tl.where(entry == K - 2 - back, node, node_of)
        old_of = tl.where(entry == K - 2 - back, K - 2 - older, old_of)
        older += tl.where(node < 0, 1, 0)
        parent = tl.load(parents_row + tl.maximum(node, 0))
        node = tl.where(node >= 0, tl.minimum(parent, node - 1), -1)
    tree = tl.load(inputs + node_of.to(tl.int64) * stride_node, mask=inside & (node_of >= 0), other=0.0)
    old = tl.load(state + old_of * stride_tok, mask=inside & (node_of < 0), other=0.0)
    return tl.where(node_of >= 0, tree.to(state.dtype.element_ty), old)


@triton.jit(do_not_specialize=["slots", "rows", "last_correct", "steps_to_track", "track_slots"])
def _commit_conv_kernel(
    conv_states,
    conv_inputs,
    slots,
    rows,
    last_correct,
    parents,
    steps_to_track,
    track_slots,
    stride_state_layer,
    stride_state_slot,
    stride_state_dim,
    stride_tok,
    stride_inputs_layer,
    stride_inputs_row,
    stride_inputs_node,
    DIM: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_TRACK: tl.constexpr,
):
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    channel = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)[:, None]
    layer = tl.program_id(1).to(tl.int64)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    if slot <= 0:
        return
    row = tl.load(rows + b).to(tl.int64)
    last = tl.load(last_correct + b).to(tl.int32)
    entry = tl.arange(0, BLOCK_W)[None, :]
    inside = (channel < DIM) & (entry < K - 1)
    base = conv_states + layer * stride_state_layer + channel.to(tl.int64) * stride_state_dim
    state = base + slot * stride_state_slot
    inputs = conv_inputs + layer * stride_inputs_layer + row * stride_inputs_row + channel
    parents_row = parents + b * N

    window = _window(last, parents_row, inputs, state, entry, stride_inputs_node, stride_tok, inside, K, N)
    if HAS_TRACK:
        step = tl.load(steps_to_track + b).to(tl.int32)
        track_slot = tl.load(track_slots + b).to(tl.int64)
        tracked = _window(step, parents_row, inputs, state, entry, stride_inputs_node, stride_tok, inside, K, N)
    # an entry is read by one thread and written by another
    tl.debug_barrier()
    tl.store(state + entry * stride_tok, window, mask=inside & (last >= 0))
    if HAS_TRACK:
        target = base + tl.maximum(track_slot, 0) * stride_state_slot + entry * stride_tok
        tl.store(target, tracked, mask=inside & (step >= 0) & (track_slot > 0))


def commit_conv(
    conv_states: torch.Tensor,
    conv_inputs: torch.Tensor,
    rows: Rows,
    *,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    track_slots: torch.Tensor | None,
) -> None:
    """Write the conv windows at the accepted and at the tracked nodes, in all layers. One launch, no host read.

    conv_states     [L, S, dim, K-1] float, any strides, oldest entry first, K in 2..4: read at the slots, written
                    there and at the track slots.
    conv_inputs     [L, R, N, dim] float, inner contiguous: read, the verify's raw inputs.
    rows            slots, rows and parents are read.
    last_correct    [B] int32 or int64: read, last accepted node of each row; < 0 leaves the slot as it is.
    steps_to_track  [B] int32 or int64: read, node whose window goes to the track slot; < 0: none. None: no row is
                    tracked.
    track_slots     [B] int32 or int64: read, <= 0: not written; distinct from every slot of the batch. None together
                    with steps_to_track.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    if (steps_to_track is None) != (track_slots is None):
        raise ValueError("steps_to_track and track_slots must be given together or not at all")
    sizes = check(
        slots=Arg(rows.slots, "B"),
        parents=Arg(rows.parents, ">=B N"),
        conv_states=Arg(conv_states, "L S dim taps", FLOATS, contiguous=0),
        conv_inputs=Arg(conv_inputs, "L R N dim", FLOATS),
        last_correct=Arg(last_correct, "B", INDICES),
        steps_to_track=Arg(steps_to_track, "B", INDICES),
        track_slots=Arg(track_slots, "B", INDICES),
    )
    batch, layers, nodes, dim, taps = sizes.get_all("B L N dim taps")
    check_width(taps + 1)
    if batch == 0 or layers == 0:
        return
    block = min(256, triton.next_power_of_2(dim))
    _commit_conv_kernel[launch_grid(triton.cdiv(dim, block) * batch, layers)](
        conv_states,
        conv_inputs,
        rows.slots,
        rows.rows,
        last_correct,
        rows.parents,
        steps_to_track,
        track_slots,
        conv_states.stride(0),
        conv_states.stride(1),
        conv_states.stride(2),
        conv_states.stride(3),
        conv_inputs.stride(0),
        conv_inputs.stride(1),
        conv_inputs.stride(2),
        DIM=dim,
        N=nodes,
        K=taps + 1,
        BLOCK_D=block,
        BLOCK_W=triton.next_power_of_2(taps),
        HAS_TRACK=steps_to_track is not None,
        num_warps=4,
    )
