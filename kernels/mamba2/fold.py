"""Fold pending Mamba2 tokens into checkpoints outside a verify: settle and snapshot, all layers in one launch.

    checkpoint[l, dst] = checkpoint[l, src] replayed over the first `count` entries of the row's window order

settle: src = dst = slot, count = pending[slot]. Snapshot: dst = the slot the radix cache will own, count = track_count.
Exact recurrence (replay.py), so the result does not depend on when it is called.

Layouts: checkpoint [L, S, nheads, headdim, dstate], or [L, S, nheads, dstate, headdim] in slots whose bit
says KV (common/tile.py); window_x [L, R, C, nheads, headdim], window_B [L, R, C, ngroups, dstate], window_dt
[L, R, C, nheads] float32. A program owns BLOCK_P rows of one head's state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.axis_order import VK
from ..common.checks import check_dtype, check_index, check_inner_contiguous, check_same_device, check_shape
from ..common.tile import IS_KV, check_layout, load_state, store_state
from .replay import inside, replay_tokens

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_P = 16


@triton.jit(do_not_specialize=["write_layout"])
def _mamba2_fold_kernel(
    checkpoint,
    state_layout,
    window_x,
    window_B,
    window_dt,
    A,
    order,
    src_slots,
    dst_slots,
    rows,
    counts,
    write_layout,
    stride_checkpoint_layer,
    stride_checkpoint_slot,
    stride_checkpoint_head,
    stride_x_layer,
    stride_x_row,
    stride_x_pos,
    stride_B_layer,
    stride_B_row,
    stride_B_pos,
    stride_dt_layer,
    stride_dt_row,
    stride_dt_pos,
    CAPACITY: tl.constexpr,
    NHEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    LAYOUTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    blocks: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    b = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    source = tl.load(src_slots + b).to(tl.int64)
    target = tl.load(dst_slots + b).to(tl.int64)
    count = tl.load(counts + b).to(tl.int32)
    if (source <= 0) | (target <= 0) | ((count <= 0) & (source == target)):
        return
    row = tl.where(count > 0, tl.load(rows + b).to(tl.int64), 0)
    dim = block * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_S)
    dim_inside = inside(dim, HEADDIM, HEADDIM % BLOCK_P == 0)
    state_inside = inside(column, DSTATE, DSTATE == BLOCK_S)
    tile_inside = dim_inside[:, None] & state_inside[None, :]
    checkpoint += layer * stride_checkpoint_layer + head * stride_checkpoint_head
    in_vk = checkpoint + (dim[:, None] * DSTATE + column[None, :])
    in_kv = checkpoint + (column[None, :] * HEADDIM + dim[:, None])
    source_at = source * stride_checkpoint_slot
    target_at = target * stride_checkpoint_slot
    from_kv = False
    to_kv = False
    if LAYOUTS:
        from_kv = tl.load(state_layout + source) == IS_KV
        # turned in place, a tile would overwrite what other programs are yet to read
        to_kv = tl.where(source == target, from_kv, write_layout == IS_KV)
    state = load_state(in_vk + source_at, in_kv + source_at, tile_inside, from_kv, LAYOUTS)
    window = (
        order + row * CAPACITY,
        window_x + layer * stride_x_layer + row * stride_x_row + head * HEADDIM + dim,
        window_B + layer * stride_B_layer + row * stride_B_row + head // HEADS_PER_GROUP * DSTATE + column[None, :],
        window_dt + layer * stride_dt_layer + row * stride_dt_row + head,
        stride_x_pos,
        stride_B_pos,
        stride_dt_pos,
        dim_inside,
        state_inside[None, :],
    )
    state = replay_tokens(state, count, tl.load(A + layer * NHEADS + head).to(tl.float32), window)
    store_state(in_vk + target_at, in_kv + target_at, state, tile_inside, to_kv, LAYOUTS)


def num_warps(dstate: int) -> int:
    """Warps of a program: 16 rows of up to 128 columns each."""
    return 1 if dstate <= 128 else 2


def mamba2_fold(
    checkpoint: torch.Tensor,
    *,
    window_x: torch.Tensor,
    window_B: torch.Tensor,
    window_dt: torch.Tensor,
    A: torch.Tensor,
    order: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    state_layout: torch.Tensor | None = None,
    write_layout: int = VK,
) -> None:
    """Write checkpoint[:, dst] = fold of the first counts[b] entries of order[rows[b]] onto checkpoint[:, src].

    checkpoint  [L, S, nheads, headdim, dstate] float, inner two dimensions contiguous: read at src, written at dst.
    window_x    [L, R, C, nheads, headdim], window_B [L, R, C, ngroups, dstate] float, window_dt [L, R, C, nheads]
                float32, each with its inner dimensions (after C) contiguous: read.
    A           [L, nheads] float32 (negative): read, contiguous.
    order       [R, C] int32 contiguous: read.
    src_slots, dst_slots, rows, counts
                [B] int32 or int64. Skipped: src <= 0, dst <= 0, count == 0 with src == dst. count == 0 with
                src != dst copies. No dst may be another batch row's src.
    state_layout
                [S] uint8, VK or KV: the layout of each source. None: all VK.
    write_layout
                VK or KV: how a dst that is not src is written; the caller sets its bit. KV needs a state_layout. In
                place the layout stays.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    layers, _, nheads, headdim, dstate = checkpoint.shape
    batch, capacity = src_slots.shape[0], order.shape[1]
    check_shape("window_x", window_x, (layers, order.shape[0], capacity, nheads, headdim))
    check_shape("window_B", window_B, (layers, order.shape[0], capacity, None, dstate))
    check_shape("window_dt", window_dt, (layers, order.shape[0], capacity, nheads))
    check_shape("A", A, (layers, nheads))
    ngroups = window_B.shape[3]
    if nheads % ngroups:
        raise ValueError(f"window_B: {ngroups} groups do not divide {nheads} heads")
    for name, tensor in {"checkpoint": checkpoint, "window_x": window_x, "window_B": window_B}.items():
        check_dtype(name, tensor, FLOAT_DTYPES)
        check_inner_contiguous(name, tensor, 2)
    for name, tensor, dims in (("window_dt", window_dt, 1), ("A", A, 2)):
        check_dtype(name, tensor, (torch.float32,))
        check_inner_contiguous(name, tensor, dims)
    check_dtype("order", order, (torch.int32,))
    check_inner_contiguous("order", order, 2)
    indices = {"src_slots": src_slots, "dst_slots": dst_slots, "rows": rows, "counts": counts}
    for name, tensor in indices.items():
        check_index(name, tensor, batch)
    check_layout(state_layout, checkpoint.shape[1], write_layout)
    check_same_device(
        checkpoint=checkpoint,
        window_x=window_x,
        window_B=window_B,
        window_dt=window_dt,
        A=A,
        order=order,
        state_layout=state_layout,
        **indices,
    )
    if batch == 0 or layers == 0:
        return
    blocks = triton.cdiv(headdim, BLOCK_P)
    _mamba2_fold_kernel[(nheads * blocks, batch, layers)](
        checkpoint,
        state_layout,
        window_x,
        window_B,
        window_dt,
        A,
        order,
        src_slots,
        dst_slots,
        rows,
        counts,
        write_layout,
        checkpoint.stride(0),
        checkpoint.stride(1),
        checkpoint.stride(2),
        window_x.stride(0),
        window_x.stride(1),
        window_x.stride(2),
        window_B.stride(0),
        window_B.stride(1),
        window_B.stride(2),
        window_dt.stride(0),
        window_dt.stride(1),
        window_dt.stride(2),
        CAPACITY=capacity,
        NHEADS=nheads,
        HEADS_PER_GROUP=nheads // ngroups,
        HEADDIM=headdim,
        DSTATE=dstate,
        LAYOUTS=state_layout is not None,
        BLOCK_P=BLOCK_P,
        BLOCK_S=triton.next_power_of_2(dstate),
        num_warps=num_warps(dstate),
    )
