"""GDN fold outside a verify: settle a slot, or write a snapshot of it, for all layers in one launch.

    S_t = e^{g_t} S_{t-1};  S_t += beta_t (v_t - S_t k_t) k_t^T        (k_t normalised)
over the first counts[b] tokens of a window, from their raw inputs, in order, in float32: plain decode's recurrence, so
nothing accumulates that plain decode would not. The arithmetic is tiles.fold_tile, the same a verify's own fold runs,
in tiles of the same shape: bit for bit the same state.

Layouts: checkpoint [L, S, HV, V, K], or [L, S, HV, K, V] in slots whose bit says so (common/tile.py); window_k
[L, R, C, H, K], window_v [L, R, C, HV, V], window_g and window_beta [L, R, C, HV]. One program does one (layer, row,
value head, tile of values).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.axis_order import VK
from ..common.checks import check_dtype, check_index, check_inner_contiguous, check_same_device, check_shape
from ..common.tile import IS_KV, check_layout, load_state, store_state
from .tiles import FACTORS, fold_tile, make_factors, may_fuse, per_k, per_row

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# the largest tile, its K pieces and its warps: those of a verify, whose fold then is this one bit for bit
BLOCK_V = 64
CHUNK = 32
NUM_WARPS = 4
# the most registers a thread may take with four such programs on a multiprocessor
REGISTERS = 128
# below this many states, tiles of half the size
FEW_HEADS = 512


@triton.jit(do_not_specialize=["write_layout"])
def _fold_kernel(
    checkpoint, state_layout, window_k, window_v, window_g, window_beta, factors, order, src_slots, dst_slots, rows,
    counts, write_layout, capacity, stride_layer, stride_slot, stride_wk_layer, stride_wk_row, stride_wk,
    stride_wv_layer, stride_wv_row, stride_wv, stride_gate_layer, stride_gate_row, stride_gate,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, NC: tl.constexpr, KC: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    batch_row = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    layer = tl.program_id(2).to(tl.int64)

    src = tl.load(src_slots + batch_row).to(tl.int64)
    dst = tl.load(dst_slots + batch_row).to(tl.int64)
    count = tl.load(counts + batch_row).to(tl.int32)
    if (src <= 0) | (dst <= 0) | ((count <= 0) & (src == dst)):
        return
    # a plain copy reads no window and its row may be garbage
    row = tl.load(rows + batch_row, mask=count > 0, other=0).to(tl.int64)

    offs_v = tl.program_id(0) * BV + tl.arange(0, BV)
    mask_v = offs_v < V
    offs_k = tl.arange(0, NC)[:, None] * KC + tl.arange(0, KC)[None, :]
    mask_k = offs_k < K
    checkpoint += layer * stride_layer + hv * (V * K)
    in_vk = per_row(offs_v) * K + per_k(offs_k)
    in_kv = per_k(offs_k) * V + per_row(offs_v)
    mask = per_row(mask_v) & per_k(mask_k)
    from_kv = False
    to_kv = False
    if LAYOUTS:
        from_kv = tl.load(state_layout + src) == IS_KV
        # turned in place it would overwrite what other programs are yet to read
        to_kv = tl.where(src == dst, from_kv, write_layout == IS_KV)
    source = checkpoint + src * stride_slot
    state = load_state(source + in_vk, source + in_kv, mask, from_kv, LAYOUTS)
    if count > 0:
        order += row * capacity
        window_k += layer * stride_wk_layer + row * stride_wk_row + h * K
        window_v += layer * stride_wv_layer + row * stride_wv_row + hv * V
        gate = layer * stride_gate_layer + row * stride_gate_row + hv
        program = (layer * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        factors += program * (capacity * FACTORS)
        make_factors(
            factors, count, order, window_k, window_g + gate, window_beta + gate, stride_wk, stride_gate, K, NC * KC
        )
        tl.debug_barrier()
        state = fold_tile(
            state, count, order, window_k, window_v, factors, stride_wk, stride_wv, offs_k, mask_k, offs_v, mask_v
        )
    written = state.to(checkpoint.dtype.element_ty)
    target = checkpoint + dst * stride_slot
    store_state(target + in_vk, target + in_kv, written, mask, to_kv, LAYOUTS)


def block_for(values: int, heads: int) -> int:
    """Values of a program, for `heads` states (rows times value heads, of all layers) of `values` each.

    Smaller tiles where large ones would leave multiprocessors idle: a fold is then shorter. The sums over K, and so the
    bits of a folded state, are the same (tests/kernels/gdn/test_gpu.py).
    """
    return min(BLOCK_V if heads >= FEW_HEADS else BLOCK_V // 2, max(16, triton.next_power_of_2(values)))


def constants_for(
    *, heads: tuple[int, int], dims: tuple[int, int], block_v: int, layouts: bool = False
) -> dict[str, int]:
    """Compile-time arguments of the kernel: heads (H, HV), dims (K, V); layouts: a state_layout is given."""
    padded_k = max(16, triton.next_power_of_2(dims[0]))
    chunk = min(CHUNK, padded_k)
    return {
        "H": heads[0], "HV": heads[1], "K": dims[0], "V": dims[1], "BV": block_v, "NC": padded_k // chunk,
        "KC": chunk, "LAYOUTS": layouts,
    }  # fmt: skip


def gdn_fold(
    checkpoint: torch.Tensor,
    *,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    window_g: torch.Tensor,
    window_beta: torch.Tensor,
    order: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    state_layout: torch.Tensor | None = None,
    write_layout: int = VK,
) -> None:
    """checkpoint[:, dst] = fold of the first counts[b] tokens of order[rows[b]] onto checkpoint[:, src].

    Read: window_* as gdn_verify leaves them, with a leading layer axis (any layer and row stride); order [R, C] int32;
        src_slots, dst_slots, rows, counts [B] int32 or int64; state_layout [S] uint8, the layout (common/layout.py) of
        each source, None: all VK.
    Written: checkpoint [L, S, HV, V, K] (any layer and slot stride) at dst. Rows with src <= 0 or dst <= 0, or with
        nothing to fold onto themselves, are skipped; counts[b] == 0 with src != dst copies. No dst may be another row's
        src or dst. Where dst is src it keeps its layout, elsewhere it is written in write_layout (KV needs a
        state_layout) and the caller sets its bit. Window and bookkeeping are left alone.
    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch = src_slots.shape[0]
    layers, _, heads_v, dim_v, dim_k = checkpoint.shape
    rows_total, capacity = order.shape
    heads_k = window_k.shape[3]
    if heads_v % heads_k:
        raise ValueError(f"checkpoint: {heads_v} heads, expected a multiple of window_k's {heads_k}")
    check_dtype("checkpoint", checkpoint, FLOATS)
    check_inner_contiguous("checkpoint", checkpoint, 3)
    check_shape("window_k", window_k, (layers, rows_total, capacity, heads_k, dim_k))
    check_shape("window_v", window_v, (layers, rows_total, capacity, heads_v, dim_v))
    for name, tensor in (("window_k", window_k), ("window_v", window_v)):
        check_dtype(name, tensor, FLOATS)
        check_inner_contiguous(name, tensor, 2)
    for name, tensor in (("window_g", window_g), ("window_beta", window_beta)):
        check_shape(name, tensor, (layers, rows_total, capacity, heads_v))
        check_dtype(name, tensor, (torch.float32,))
        check_inner_contiguous(name, tensor)
    if window_g.stride() != window_beta.stride():
        raise ValueError(f"window_beta: strides {window_beta.stride()}, expected window_g's {window_g.stride()}")
    check_dtype("order", order, (torch.int32,))
    check_inner_contiguous("order", order, 2)
    for name, tensor in (("src_slots", src_slots), ("dst_slots", dst_slots), ("rows", rows), ("counts", counts)):
        check_index(name, tensor, batch)
    check_layout(state_layout, checkpoint.shape[1], write_layout)
    check_same_device(
        checkpoint=checkpoint, window_k=window_k, window_v=window_v, window_g=window_g, window_beta=window_beta,
        order=order, src_slots=src_slots, dst_slots=dst_slots, rows=rows, counts=counts, state_layout=state_layout,
    )  # fmt: skip
    if batch == 0:
        return

    block_v = block_for(dim_v, layers * batch * heads_v)
    tiles = triton.cdiv(dim_v, block_v)
    factors = torch.empty(
        layers * batch * heads_v * tiles, capacity, FACTORS.value, dtype=torch.float32, device=checkpoint.device
    )
    constants = constants_for(
        heads=(heads_k, heads_v), dims=(dim_k, dim_v), block_v=block_v, layouts=state_layout is not None
    )
    _fold_kernel[(tiles, batch * heads_v, layers)](
        checkpoint, state_layout, window_k, window_v, window_g, window_beta, factors, order, src_slots, dst_slots, rows,
        counts, write_layout, capacity,
        checkpoint.stride(0), checkpoint.stride(1),
        window_k.stride(0), window_k.stride(1), window_k.stride(2),
        window_v.stride(0), window_v.stride(1), window_v.stride(2),
        window_g.stride(0), window_g.stride(1), window_g.stride(2),
        **constants, num_warps=NUM_WARPS, maxnreg=REGISTERS, enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
