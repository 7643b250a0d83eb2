"""GDN fold outside a verify: settle a slot, or write a snapshot of it, for all layers in one launch.

    S_t = e^{g_t} S_{t-1};  S_t += beta_t (v_t - S_t k_t) k_t^T        (k_t normalised)
over the first counts[b] tokens of a window, from their raw inputs, in order, in float32: plain decode's recurrence, so
nothing accumulates that plain decode would not. The arithmetic is tiles.fold_tile, the same a verify's own fold runs,
in tiles of the same shape: bit for bit the same state.

Shapes: states [L, S, HV, V, K], or [L, S, HV, K, V] in slots whose bit says so (common/tile.py); window_k
[L, R, C, H, K], window_v [L, R, C, HV, V], window_g and window_beta [L, R, C, HV]. One program does one (layer, row,
value head, tile of values).
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
from .tiles import FACTORS, fold_tile, make_factors, may_fuse, per_k, per_row
from .window import GdnWindow

# the largest tile, its K pieces and its warps: those of a verify, whose fold then is this one bit for bit
BLOCK_V = 64
CHUNK = 32
NUM_WARPS = 4
# the most registers a thread may take with four such programs on a multiprocessor
REGISTERS = 128
# below this many states, tiles of half the size
FEW_HEADS = 512


@triton.jit(do_not_specialize=["src_slots", "dst_slots", "rows", "counts", "write"])
def _fold_kernel(
    states, axis_order, window_k, window_v, window_g, window_beta, factors, order, src_slots, dst_slots, rows,
    counts, write, capacity, stride_layer, stride_slot, stride_wk_layer, stride_wk_row, stride_wk,
    stride_wv_layer, stride_wv_row, stride_wv, stride_gate_layer, stride_gate_row, stride_gate,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, NC: tl.constexpr, KC: tl.constexpr, EITHER: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    batch_row = tl.program_id(0) // (tiles * HV)
    hv = tl.program_id(0) // tiles % HV
    h = hv // (HV // H)
    layer = tl.program_id(1).to(tl.int64)

    src = tl.load(src_slots + batch_row).to(tl.int64)
    dst = tl.load(dst_slots + batch_row).to(tl.int64)
    count = tl.load(counts + batch_row).to(tl.int32)
    if (src <= 0) | (dst <= 0) | ((count <= 0) & (src == dst)):
        return
    # a plain copy reads no window and its row may be garbage
    row = tl.load(rows + batch_row, mask=count > 0, other=0).to(tl.int64)

    offs_v = tl.program_id(0) % tiles * BV + tl.arange(0, BV)
    mask_v = offs_v < V
    offs_k = tl.arange(0, NC)[:, None] * KC + tl.arange(0, KC)[None, :]
    mask_k = offs_k < K
    states += layer * stride_layer + hv * (V * K)
    in_vk = per_row(offs_v) * K + per_k(offs_k)
    in_kv = per_k(offs_k) * V + per_row(offs_v)
    mask = per_row(mask_v) & per_k(mask_k)
    from_kv = False
    to_kv = False
    if EITHER:
        from_kv = tl.load(axis_order + src) == IS_KV
        # turned in place it would overwrite what other programs are yet to read
        to_kv = tl.where(src == dst, from_kv, write == IS_KV)
    source = states + src * stride_slot
    state = load_state(source + in_vk, source + in_kv, mask, from_kv, EITHER)
    if count > 0:
        order += row * capacity
        window_k += layer * stride_wk_layer + row * stride_wk_row + h * K
        window_v += layer * stride_wv_layer + row * stride_wv_row + hv * V
        gate = layer * stride_gate_layer + row * stride_gate_row + hv
        program = layer * tl.num_programs(0) + tl.program_id(0)
        factors += program * (capacity * FACTORS)
        make_factors(
            factors, count, order, window_k, window_g + gate, window_beta + gate, stride_wk, stride_gate, K, NC * KC
        )
        tl.debug_barrier()
        state = fold_tile(
            state, count, order, window_k, window_v, factors, stride_wk, stride_wv, offs_k, mask_k, offs_v, mask_v
        )
    written = state.to(states.dtype.element_ty)
    target = states + dst * stride_slot
    store_state(target + in_vk, target + in_kv, written, mask, to_kv, EITHER)


def block_for(values: int, heads: int) -> int:
    """Values of a program, for `heads` states (rows times value heads, of all layers) of `values` each.

    Smaller tiles where large ones would leave multiprocessors idle: a fold is then shorter. The sums over K, and so the
    bits of a folded state, are the same (tests/kernels/gdn/test_gpu.py).
    """
    return min(BLOCK_V if heads >= FEW_HEADS else BLOCK_V // 2, max(16, triton.next_power_of_2(values)))


def constants_for(
    *, heads: tuple[int, int], dims: tuple[int, int], block_v: int, either: bool = False
) -> dict[str, int]:
    """Compile-time arguments of the kernel: heads (H, HV), dims (K, V).

    either: slots may lie in either axis order.
    """
    padded_k = max(16, triton.next_power_of_2(dims[0]))
    chunk = min(CHUNK, padded_k)
    return {
        "H": heads[0], "HV": heads[1], "K": dims[0], "V": dims[1], "BV": block_v, "NC": padded_k // chunk,
        "KC": chunk, "EITHER": either,
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

    block_v = block_for(dim_v, layers * batch * heads_v)
    programs = batch * heads_v * triton.cdiv(dim_v, block_v)
    factors = torch.empty(layers * programs, capacity, FACTORS.value, dtype=torch.float32, device=states.data.device)
    constants = constants_for(
        heads=(heads_k, heads_v), dims=(dim_k, dim_v), block_v=block_v, either=states.axis_order is not None
    )
    _fold_kernel[launch_grid(programs, layers)](
        states.data, states.axis_order, window.k, window.v, window.g, window.beta, factors, window.order,
        folds.src, folds.dst, folds.rows, folds.counts, states.write, capacity,
        states.data.stride(0), states.data.stride(1),
        window.k.stride(0), window.k.stride(1), window.k.stride(2),
        window.v.stride(0), window.v.stride(1), window.v.stride(2),
        window.g.stride(0), window.g.stride(1), window.g.stride(2),
        **constants, num_warps=NUM_WARPS, maxnreg=REGISTERS, enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
