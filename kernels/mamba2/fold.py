"""Fold pending Mamba2 tokens into checkpoints outside a verify: settle and snapshot, all layers in one launch.

    states[l, dst] = states[l, src] after the first `count` tokens of the row's window order

settle: src = dst = slot, count = pending[slot]. Snapshot: dst = the slot the radix cache will own, count = track_count.
The arithmetic is that of a verify's own fold (fold_tile.py), bit for bit: a state does not depend on which of the two
folded it.

Layouts: states [L, S, H, P, D], or [L, S, H, D, P] in slots that lie as KV (common/axis_order.py); window.x
[L, R, C, H, P], window.B [L, R, C, G, D], window.dt [L, R, C, H] float32. A program owns BLOCK_P rows and PART columns
of one head's state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.elementary import exp_of_sum
from ..common.fragments import (
    as_tile,
    chunk_of,
    inside,
    load_rows,
    multiply_add,
    per_column,
    per_row,
    rows_as_left,
    tile_column,
    tile_row,
)
from ..common.grid import launch_grid
from ..common.operands import Folds, States
from ..common.tile import IS_KV, load_state, store_state
from .arguments import check_groups
from .fold_tile import TOKENS, pending_places, pending_steps, weighted, weights
from .window import Mamba2Window

BLOCK_P, PART = 16, 128  # rows and columns of a program, one warp


@triton.jit(do_not_specialize=["src_slots", "dst_slots", "rows", "counts", "write_order"])
def _mamba2_fold_kernel(
    states,
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
    stride_layer,
    stride_slot,
    stride_head,
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
    NATIVE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pieces: tl.constexpr = BLOCKS * PARTS
    block = tl.program_id(0) % pieces // PARTS
    first_s = tl.program_id(0) % PARTS * PART
    head = tl.program_id(0) // pieces % HEADS
    b = tl.program_id(0) // (pieces * HEADS)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(src_slots + b).to(tl.int64)
    target = tl.load(dst_slots + b).to(tl.int64)
    count = tl.load(counts + b).to(tl.int32)
    if (source <= 0) | (target <= 0) | ((count <= 0) & (source == target)):
        return
    states += layer * stride_layer + head * stride_head
    tile_p = block * BLOCK_P + tile_row(BLOCK_P, 1)
    tile_s = first_s + tile_column(PART, CHUNK)
    in_vk = per_row(tile_p) * DSTATE + per_column(tile_s)
    in_kv = per_row(tile_p) + per_column(tile_s) * HEADDIM
    tile_inside = per_row(inside(tile_p, HEADDIM, HEADDIM % BLOCK_P == 0)) & per_column(
        inside(tile_s, DSTATE, DSTATE % PART == 0)
    )
    from_kv = False
    to_kv = False
    if EITHER:
        from_kv = tl.load(axis_order + source) == IS_KV
        # turned in place, a tile would overwrite what other programs are yet to read
        to_kv = tl.where(source == target, from_kv, write_order == IS_KV)
    at = states + source * stride_slot
    state = load_state(at + in_vk, at + in_kv, tile_inside, from_kv, EITHER)
    if count > 0:  # a plain copy reads no window, and its row may be garbage
        row = tl.load(rows + b).to(tl.int64)
        order += row * CAPACITY
        dim = block * BLOCK_P + tl.arange(0, BLOCK_P)
        dim_inside = inside(dim, HEADDIM, HEADDIM % BLOCK_P == 0)
        window_x += layer * stride_x_layer + row * stride_x_row + head * HEADDIM
        window_B += layer * stride_B_layer + row * stride_B_row + head // HEADS_PER_GROUP * DSTATE
        window_dt += layer * stride_dt_layer + row * stride_dt_row + head
        decay_rate = tl.load(A + layer * HEADS + head)
        total = tl.full((), 0.0, tl.float64)
        for start in range(0, count, TOKENS):
            position, live = pending_places(start, count, order)
            _, g = pending_steps(position, live, window_dt, stride_dt_pos, decay_rate)
            total += tl.sum(g, axis=0)
        passed = tl.full((), 0.0, tl.float64)
        added = tl.zeros((BLOCK_P, PART), tl.float32)
        for start in range(0, count, TOKENS):
            position, live = pending_places(start, count, order)
            dt, g = pending_steps(position, live, window_dt, stride_dt_pos, decay_rate)
            x = tl.load(
                window_x + position[None, :] * stride_x_pos + dim[:, None],
                mask=live[None, :] & dim_inside[:, None],
                other=0.0,
            )
            B = load_rows(window_B, stride_B_pos, (position, live, first_s), DSTATE, PART, CHUNK)
            B = rows_as_left(B, CHUNK, NATIVE)
            factor = weighted(x, weights(dt, g, passed, total), B.dtype)
            added = multiply_add(factor, (B,), added, NATIVE)
            passed += tl.sum(g, axis=0)
        added = as_tile(added, CHUNK, 1)
        state = tl.fma(state, exp_of_sum(total), added)
    at = states + target * stride_slot
    store_state(at + in_vk, at + in_kv, state, tile_inside, to_kv, EITHER)


def constants_for(
    *, heads: int, groups: int, headdim: int, dstate: int, capacity: int, state: torch.dtype, either: bool
) -> dict[str, int]:
    """Compile-time arguments of the kernel. state: its dtype; either: slots may lie in either axis order."""
    part = min(PART, triton.next_power_of_2(dstate))
    return {
        "CAPACITY": capacity,
        "HEADS": heads,
        "HEADS_PER_GROUP": heads // groups,
        "HEADDIM": headdim,
        "DSTATE": dstate,
        "EITHER": either,
        "NATIVE": not triton.knobs.runtime.interpret,  # the interpreter multiplies bfloat16 as integers
        "BLOCK_P": BLOCK_P,
        "BLOCKS": triton.cdiv(headdim, BLOCK_P),
        "PART": part,
        "PARTS": triton.cdiv(dstate, part),
        "CHUNK": chunk_of(state, part),
    }


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
    window.check_reach()
    if batch == 0 or layers == 0:
        return
    constants = constants_for(
        heads=nheads,
        groups=ngroups,
        headdim=headdim,
        dstate=dstate,
        capacity=window.order.shape[1],
        state=states.data.dtype,
        either=states.axis_order is not None,
    )
    grid = launch_grid(batch * nheads * constants["BLOCKS"] * constants["PARTS"], layers)
    _mamba2_fold_kernel[grid](
        states.data, states.axis_order, window.x, window.B, window.dt, A, window.order, folds.src, folds.dst,
        folds.rows, folds.counts, states.write,
        states.data.stride(0), states.data.stride(1), states.data.stride(2),
        window.x.stride(0), window.x.stride(1), window.x.stride(2),
        window.B.stride(0), window.B.stride(1), window.B.stride(2),
        window.dt.stride(0), window.dt.stride(1), window.dt.stride(2),
        **constants,
        num_warps=1,
        num_stages=1,  # few windows have a second turn of the loop
    )  # fmt: skip
