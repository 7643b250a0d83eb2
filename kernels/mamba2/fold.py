"""Fold pending Mamba2 tokens into checkpoints outside a verify: settle and snapshot, all layers in one launch.

    checkpoint[l, dst] = checkpoint[l, src] replayed over the first `count` entries of the row's window order

settle: src = dst = slot, count = pending[slot]. Snapshot: dst = the slot the radix cache will own, count = track_count.
Exact recurrence (fold_tile.py), so the result does not depend on when it is called.

Layouts: checkpoint [L, S, nheads, headdim, dstate], or [L, S, nheads, dstate, headdim] in slots that lie
as KV (common/axis_order.py); window_x [L, R, C, nheads, headdim], window_B [L, R, C, ngroups, dstate], window_dt
[L, R, C, nheads] float32. A program owns BLOCK_P rows of one head's state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.grid import launch_grid
from ..common.operands import Folds, States
from ..common.tile import IS_KV, load_state, store_state
from .arguments import check_groups
from .fold_tile import inside, replay_tokens
from .window import Mamba2Window

BLOCK_P = 16


@triton.jit(do_not_specialize=["write_order"])
def _mamba2_fold_kernel(
    checkpoint,
    axis_order,
    window_x,
    window_B,
    window_dt,
    A,
    order,
    src_slots,
    dst_slots,
    rows,
    counts,
    write_order,
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
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    EITHER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    blocks: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % HEADS
    b = tl.program_id(0) // (blocks * HEADS)
    layer = tl.program_id(1).to(tl.int64)
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
    if EITHER:
        from_kv = tl.load(axis_order + source) == IS_KV
        # turned in place, a tile would overwrite what other programs are yet to read
        to_kv = tl.where(source == target, from_kv, write_order == IS_KV)
    state = load_state(in_vk + source_at, in_kv + source_at, tile_inside, from_kv, EITHER)
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
    state = replay_tokens(state, count, tl.load(A + layer * HEADS + head).to(tl.float32), window)
    store_state(in_vk + target_at, in_kv + target_at, state, tile_inside, to_kv, EITHER)


def num_warps(dstate: int) -> int:
    """Warps of a program: 16 rows of up to 128 columns each."""
    return 1 if dstate <= 128 else 2


def mamba2_fold(states: States, window: Mamba2Window, folds: Folds, *, A: torch.Tensor) -> None:
    """states[:, dst] = fold of the first counts[b] entries of order[rows[b]] onto states[:, src], in all layers.

    states  [L, S, H, P, D]: read at src as they lie, written at dst.
    window  of all layers: read. pending is not looked at.
    folds   what to fold; see Folds for what is skipped and what only copied.
    A       [L, H] float32 (negative), contiguous: read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        states=Arg(states.data, "L S H P D", FLOATS, contiguous=2),
        axis_order=Arg(states.axis_order, "S"),
        order=Arg(window.order, "R C"),
        window_x=Arg(window.x, "L R C H P", FLOATS, contiguous=2),
        window_B=Arg(window.B, "L R C G D", window.x.dtype, contiguous=2),
        window_dt=Arg(window.dt, "L R C H", torch.float32),
        A=Arg(A, "L H", torch.float32, contiguous=2),
        src_slots=Arg(folds.src, "B"),
    )
    layers, batch, nheads, headdim, ngroups, dstate = sizes.get_all("L B H P G D")
    check_groups(nheads, ngroups)
    if batch == 0 or layers == 0:
        return
    _mamba2_fold_kernel[launch_grid(batch * nheads * triton.cdiv(headdim, BLOCK_P), layers)](
        states.data, states.axis_order, window.x, window.B, window.dt, A, window.order, folds.src, folds.dst,
        folds.rows, folds.counts, states.write,
        states.data.stride(0), states.data.stride(1), states.data.stride(2),
        window.x.stride(0), window.x.stride(1), window.x.stride(2),
        window.B.stride(0), window.B.stride(1), window.B.stride(2),
        window.dt.stride(0), window.dt.stride(1), window.dt.stride(2),
        CAPACITY=window.order.shape[1],
        HEADS=nheads,
        HEADS_PER_GROUP=nheads // ngroups,
        HEADDIM=headdim,
        DSTATE=dstate,
        EITHER=states.axis_order is not None,
        BLOCK_P=BLOCK_P,
        BLOCK_S=triton.next_power_of_2(dstate),
        num_warps=num_warps(dstate),
    )  # fmt: skip
