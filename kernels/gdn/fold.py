"""GDN fold outside a verify: settle a slot, or write a snapshot of it, for all layers in one launch.

    states[l, dst] = states[l, src] after the first counts[b] tokens of the row's window order

The arithmetic is that of a verify's own fold (fold_tile.py), bit for bit: a state does not depend on which of the two
folded it.

Shapes: states [L, S, HV, V, K], or [L, S, HV, K, V] in slots whose bit says so (common/tile.py); window_k
[L, R, C, H, K], window_v [L, R, C, HV, V], window_g and window_beta [L, R, C, HV]. One program does one (layer, row,
value head, block of values).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.fragments import chunk_of, inside, per_column, per_row, tile_column, tile_row
from ..common.grid import launch_grid
from ..common.operands import Folds, States
from ..common.tile import IS_KV, load_state, store_state
from .arguments import check_groups
from .fold_tile import TOKENS, fold_step, in_addends, key_products, step_factors, step_keys, step_tokens
from .tiles import may_fuse
from .window import GdnWindow

BLOCK_V, WARPS = 32, 2  # values of a program, and its warps
PART = 64  # K columns of a product, as in a verify: its sums have another order in other pieces


@triton.jit(do_not_specialize=["src_slots", "dst_slots", "rows", "counts", "write"])
def _fold_kernel(
    states, axis_order, window_k, window_v, window_g, window_beta, order, src_slots, dst_slots, rows,
    counts, write, capacity, stride_layer, stride_slot, stride_wk_layer, stride_wk_row, stride_wk,
    stride_wv_layer, stride_wv_row, stride_wv, stride_gate_layer, stride_gate_row, stride_gate,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr, EITHER: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (V + BV - 1) // BV
    batch_row = tl.program_id(0) // (blocks * HV)
    hv = tl.program_id(0) // blocks % HV
    first_v = tl.program_id(0) % blocks * BV
    layer = tl.program_id(1).to(tl.int64)

    src = tl.load(src_slots + batch_row).to(tl.int64)
    dst = tl.load(dst_slots + batch_row).to(tl.int64)
    count = tl.load(counts + batch_row).to(tl.int32)
    if (src <= 0) | (dst <= 0) | ((count <= 0) & (src == dst)):
        return
    # a plain copy reads no window and its row may be garbage
    row = tl.load(rows + batch_row, mask=count > 0, other=0).to(tl.int64)

    tile_v = first_v + tile_row(BV, WARPS)
    states += layer * stride_layer + hv * (V * K)
    from_kv = False
    to_kv = False
    if EITHER:
        from_kv = tl.load(axis_order + src) == IS_KV
        # turned in place it would overwrite what other programs are yet to read
        to_kv = tl.where(src == dst, from_kv, write == IS_KV)
    source = states + src * stride_slot
    target = states + dst * stride_slot
    tile_inside = per_row(inside(tile_v, V, V % BV == 0))
    tiles = ()
    for part in tl.static_range(PARTS):
        tile_k = part * PART + tile_column(PART, CHUNK)
        in_vk = per_row(tile_v) * K + per_column(tile_k)
        in_kv = per_row(tile_v) + per_column(tile_k) * V
        mask = tile_inside & per_column(inside(tile_k, K, K % PART == 0))
        tiles = tiles + (load_state(source + in_vk, source + in_kv, mask, from_kv, EITHER),)  # noqa: RUF005
    order += row * capacity
    k_head = window_k + layer * stride_wk_layer + row * stride_wk_row + hv // (HV // H) * K
    v_head = window_v + layer * stride_wv_layer + row * stride_wv_row + hv * V
    gate = layer * stride_gate_layer + row * stride_gate_row + hv
    dim = first_v + tl.arange(0, BV)
    dim_inside = inside(dim, V, V % BV == 0)
    for start in range(0, count, TOKENS):
        position, live = step_tokens(start, count, order)
        products = key_products(k_head, stride_wk, position, live, K, PARTS, PART, NATIVE)
        factors = step_factors(products, window_g + gate, window_beta + gate, stride_gate, position, live)
        keys = step_keys(k_head, stride_wk, position, live, K, PARTS, PART, CHUNK)
        values = tl.load(
            v_head + position[None, :] * stride_wv + dim[:, None],
            mask=live[None, :] & dim_inside[:, None],
            other=0.0,
        )
        tiles = fold_step(tiles, values, keys, in_addends(factors), CHUNK, WARPS, NATIVE)
    for part in tl.static_range(PARTS):
        tile_k = part * PART + tile_column(PART, CHUNK)
        in_vk = per_row(tile_v) * K + per_column(tile_k)
        in_kv = per_row(tile_v) + per_column(tile_k) * V
        mask = tile_inside & per_column(inside(tile_k, K, K % PART == 0))
        store_state(target + in_vk, target + in_kv, tiles[part], mask, to_kv, EITHER)


def constants_for(
    *, heads: tuple[int, int], dims: tuple[int, int], state: torch.dtype, either: bool = False
) -> dict[str, int]:
    """Compile-time arguments of the kernel: heads (H, HV), dims (K, V), the states' dtype.

    either: slots may lie in either axis order.
    """
    padded_k = max(16, triton.next_power_of_2(dims[0]))
    part = min(PART, padded_k)
    return {
        "H": heads[0], "HV": heads[1], "K": dims[0], "V": dims[1], "BV": BLOCK_V, "PARTS": triton.cdiv(dims[0], part),
        "PART": part, "CHUNK": chunk_of(state, part), "WARPS": WARPS, "EITHER": either,
        "NATIVE": not triton.knobs.runtime.interpret,  # the interpreter multiplies bfloat16 as integers
    }  # fmt: skip


def gdn_fold(states: States, window: GdnWindow, folds: Folds) -> None:
    """Fold window tokens onto states, in all layers. One launch, no host read.

    states  [L, S, HV, V, K], each slot contiguous: read at the sources, written at the destinations; in place in the
            axis order it has, elsewhere in states.write (whose entry the caller sets).
    window  of all layers: read, its bookkeeping as well as inputs as gdn_verify left them.
    folds   read.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        src_slots=Arg(folds.src, "B"),
        states=Arg(states.data, "L S HV V K", FLOATS, contiguous=3),
        axis_order=Arg(states.axis_order, "S"),
        order=Arg(window.order, "R C"),
        **window.inputs_as("L R C"),
    )
    batch, layers, heads_v, heads_k, dim_v, dim_k, capacity = sizes.get_all("B L HV H V K C")
    check_groups("states", heads_v, heads_k)
    if batch == 0:
        return

    constants = constants_for(
        heads=(heads_k, heads_v), dims=(dim_k, dim_v), state=states.data.dtype, either=states.axis_order is not None
    )
    _fold_kernel[launch_grid(batch * heads_v * triton.cdiv(dim_v, BLOCK_V), layers)](
        states.data, states.axis_order, window.k, window.v, window.g, window.beta, window.order,
        folds.src, folds.dst, folds.rows, folds.counts, states.write, capacity,
        states.data.stride(0), states.data.stride(1),
        window.k.stride(0), window.k.stride(1), window.k.stride(2),
        window.v.stride(0), window.v.stride(1), window.v.stride(2),
        window.g.stride(0), window.g.stride(1), window.g.stride(2),
        **constants,
        num_warps=WARPS,
        num_stages=1,  # few windows have a second turn of the loop
        enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
