"""GDN target verify by replay: outputs of all draft nodes of a row from one read of its state.

prepare.py turns query i into x_i and one weight y_it per window token, so that
    o_i = S0 x_i + sum_t y_it v_t        (t over the pending tokens, the node's ancestors and the node)
with S0 the checkpoint. This kernel streams S0 past the x of all nodes and appends the nodes' values to the window. A
row with more than `fold_threshold` pending tokens folds them, or all but its newest step's, into its checkpoint first,
in order, in float32 (tiles.fold_tile), and its outputs start from the state as written.

One program does one (row, value head, tile of values). Programs share nothing they write: node inputs are read from the
arguments, never from window entries that another program stores.

Shapes: checkpoint [S, HV, V, K], or [S, HV, K, V] in slots whose bit says so (common/tile.py); window_k [R, C, H, K],
window_v [R, C, HV, V], window_g and window_beta [R, C, HV].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.grid import launch_grid
from ..common.operands import Rows, States, check_nodes
from ..common.pending import pending_and_folding
from ..common.tile import IS_KV, load_state, store_state
from .arguments import check_groups, node_inputs
from .fold import BLOCK_V, CHUNK, FEW_HEADS, NUM_WARPS, REGISTERS, block_for
from .prepare import prepare_kernel
from .tiles import FACTORS, dot_split, fold_tile, halves, k_by_rows, make_factors, may_fuse, per_k, per_row, split
from .window import GdnWindow


@triton.jit
def _verify_kernel(
    v, states, axis_order, slots, rows, pending, newest, order, window_k, window_v, window_g, window_beta, carried,
    weights, factors, out, fold_threshold, capacity, stride_v, stride_slot,
    stride_wk_row, stride_wk, stride_wv_row, stride_wv, stride_gate_row, stride_gate,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, NC: tl.constexpr, KC: tl.constexpr,
    SPLIT: tl.constexpr, OVERLAP: tl.constexpr, EITHER: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles  # of all rows
    batch_row = (head // HV).to(tl.int64)
    hv = head % HV
    offs_v = tile * BV + tl.arange(0, BV)
    mask_v = offs_v < V
    node = tl.arange(0, BM)
    mask_m = node < N
    p_out = out + (batch_row * N + node[:, None]) * (HV * V) + hv * V + offs_v[None, :]
    mask_out = mask_m[:, None] & mask_v[None, :]

    slot = tl.load(slots + batch_row).to(tl.int64)
    if slot <= 0:
        tl.store(p_out, tl.zeros([BM, BV], dtype=out.dtype.element_ty), mask=mask_out)
        if OVERLAP:
            # whoever waits for this kernel waits for the first one too
            tl.extra.cuda.gdc_wait()
        return
    row = tl.load(rows + batch_row).to(tl.int64)
    before, folding = pending_and_folding(pending, newest, slot, fold_threshold)
    offs_k = tl.arange(0, NC)[:, None] * KC + tl.arange(0, KC)[None, :]
    mask_k = offs_k < K
    states = states + slot * stride_slot + hv * (V * K)
    p_vk = states + per_row(offs_v) * K + per_k(offs_k)
    p_kv = states + per_k(offs_k) * V + per_row(offs_v)
    mask_state = per_row(mask_v) & per_k(mask_k)
    is_kv = False
    if EITHER:
        is_kv = tl.load(axis_order + slot) == IS_KV
    state = load_state(p_vk, p_kv, mask_state, is_kv, EITHER)
    order += row * capacity
    window_v += row * stride_wv_row + hv * V

    if folding > 0:
        window_k += row * stride_wk_row + hv // (HV // H) * K
        gate = row * stride_gate_row + hv
        # prepare.py has those of the first B * HV
        factors += ((1 + tile).to(tl.int64) * (tl.num_programs(0) // tiles) + head) * (capacity * FACTORS)
        make_factors(
            factors, folding, order, window_k, window_g + gate, window_beta + gate, stride_wk, stride_gate, K, NC * KC
        )
        tl.debug_barrier()
        state = fold_tile(
            state, folding, order, window_k, window_v, factors, stride_wk, stride_wv, offs_k, mask_k, offs_v, mask_v
        )
        # outputs start from what is written, as the next verify's will
        written = state.to(states.dtype.element_ty)
        store_state(p_vk, p_kv, written, mask_state, is_kv, EITHER)
        state = written.to(tl.float32)

    # values of the path: kept pending tokens from the window, nodes from the argument
    kept = before - folding
    total = kept + N
    column = tl.arange(0, BT)
    position = tl.load(order + folding + column, mask=column < total, other=0).to(tl.int64)
    is_node = ((column >= kept) & (column < total))[:, None] & mask_v[None, :]
    p_window = window_v + position[:, None] * stride_wv + offs_v[None, :]
    p_node = v + (batch_row * N + column - kept)[:, None] * stride_v + hv * V + offs_v[None, :]
    values = tl.load(tl.where(is_node, p_node, p_window), mask=(column < total)[:, None] & mask_v[None, :], other=0)
    tl.store(p_window, values, mask=is_node)

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    program = head.to(tl.int64)
    offs_flat = tl.arange(0, NC * KC)
    p_x = carried + program * (N * K) + node[:, None] * K + offs_flat[None, :]
    mask_x = mask_m[:, None] & (offs_flat < K)[None, :]
    x = tl.load(p_x, mask=mask_x, other=0)
    p_y = weights + program * (N * BT) + node[:, None] * BT + column[None, :]
    y = tl.load(p_y, mask=mask_m[:, None] & (column < total)[None, :], other=0)
    acc = tl.zeros([BM, BV], dtype=tl.float32)
    if SPLIT:
        # carried holds the high halves of all rows, then the low ones
        x_low = tl.load(p_x + (tl.num_programs(0) // tiles).to(tl.int64) * (N * K), mask=mask_x, other=0)
        y_high, y_low = split(y)
        v_high, v_low = halves(values)
        acc = dot_split(y_high, y_low, v_high, v_low, acc, v.dtype.element_ty == tl.bfloat16)
        # halves first: they, not the float32 tile, go through shared memory to the tensor cores' layout
        high, low = halves(state.to(states.dtype.element_ty))
        acc = dot_split(x, x_low, k_by_rows(high), k_by_rows(low), acc, states.dtype.element_ty == tl.bfloat16)
    else:
        acc = tl.dot(y, values.to(tl.float32), acc, input_precision="ieee")
        acc = tl.dot(x, k_by_rows(state), acc, input_precision="ieee")
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=mask_out)


@dataclass(frozen=True)
class VerifyConfig:
    """How gdn_verify is cut up. None of it changes what is computed beyond rounding.

    block_v                   values of a program; at least 8 per warp, or several warps share a bf16 row's K and the
                              sums of a fold change order.
    chunk, query_chunk        pieces of the K axis of the state tile and of the queries (tiles.py).
    num_warps, prepare_warps  of the two kernels.
    split                     products on bf16 tensor cores, operands in two halves (tiles.dot_split); else in float32
                              multiply-adds, all that Triton's interpreter can do.
    overlap                   let the second kernel start and load state while the first runs (programmatic dependent
                              launch).
    registers                 cap per thread of the second kernel; None: the compiler's choice.
    """

    block_v: int = BLOCK_V
    chunk: int = CHUNK
    query_chunk: int = 64
    num_warps: int = NUM_WARPS
    prepare_warps: int = 1
    split: bool = True
    overlap: bool = False
    registers: int | None = REGISTERS


def default_config(
    *, nodes: int, values: int, exact: bool, heads: int = FEW_HEADS, overlap: bool = False
) -> VerifyConfig:
    """The configuration gdn_verify uses: values is V, heads is rows times HV.

    exact asks for float32 products; overlap needs a Hopper GPU.

    Tiles are those of gdn_fold: a checkpoint does not depend on which of the two folded it.
    """
    return VerifyConfig(
        block_v=block_for(values, heads), prepare_warps=2 if nodes > 8 else 1, split=not exact, overlap=overlap
    )


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def constants_for(
    config: VerifyConfig,
    *,
    nodes: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    fold_threshold: int,
    either: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time arguments of prepare_kernel and of the verify kernel: heads (H, HV), dims (K, V).

    either: slots may lie in either axis order.
    """
    padded_k = max(16, triton.next_power_of_2(dims[0]))
    chunk, query_chunk = min(config.chunk, padded_k), min(config.query_chunk, padded_k)
    common = {
        "N": nodes, "H": heads[0], "HV": heads[1], "K": dims[0], "OVERLAP": config.overlap, "SPLIT": config.split,
        "BT": max(16, triton.next_power_of_2(fold_threshold + nodes)),
    }  # fmt: skip
    prepare = {"BN": triton.next_power_of_2(nodes), "NC": padded_k // query_chunk, "KC": query_chunk}
    verify = {
        "V": dims[1], "BM": max(16, triton.next_power_of_2(nodes)), "BV": config.block_v,
        "NC": padded_k // chunk, "KC": chunk, "EITHER": either,
    }  # fmt: skip
    return {**common, **prepare}, {**common, **verify}


def gdn_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    states: States,
    rows: Rows,
    window: GdnWindow,
    config: VerifyConfig | None = None,
) -> torch.Tensor:
    """Score the N draft nodes of each of B rows against state + pending tokens; returns o [B*N, HV, V] in q's dtype.

    q, k     [B*N, H, K] float, heads contiguous, any token stride: read, after the convolution, before normalisation.
    v        [B*N, HV, V] float, heads contiguous, any token stride: read, after the convolution.
    a, b     [B*N, HV] float, inner contiguous, any token stride: read, raw gate inputs.
    A_log, dt_bias
             [HV] float: read.
    scale    multiplies normalised q.
    states   [S, HV, V, K], each slot contiguous: read at the slots; rows that fold are written in place, in the axis
             order they have.
    rows     slots, rows and ancestors are read; outputs of padding are zero.
    window   of one layer: at the rows, pending tokens are read, and node i of row r is written to
             order[r, pending + i]: k and v raw, in their dtype, g and beta in float32. pending stays as it is.
    config   how to cut it up; None: the default.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        slots=Arg(rows.slots, "B"),
        ancestors=Arg(rows.ancestors, ">=B N"),
        **node_inputs(q, k, v, a, b, A_log, dt_bias),
        states=Arg(states.data, "S HV V K", FLOATS, contiguous=3),
        axis_order=Arg(states.axis_order, "S"),
        pending=Arg(window.pending, "S"),
        order=Arg(window.order, "R C"),
        **window.inputs_as("R C"),
    )
    batch, nodes, heads_k, heads_v, dim_k, dim_v, capacity = sizes.get_all("B N H HV K V C")
    for name, tensor, like in (("window_k", window.k, k), ("window_v", window.v, v)):
        if tensor.dtype != like.dtype:
            raise TypeError(f"{name}: dtype {tensor.dtype}, expected {like.dtype}")
    check_groups("v", heads_v, heads_k)
    check_nodes(nodes)
    window.check_room(nodes)

    out = torch.empty(batch * nodes, heads_v, dim_v, dtype=q.dtype, device=q.device)
    if batch == 0 or nodes == 0:
        return out
    if config is None:
        # the interpreter computes no bf16 products, and float32 outputs deserve better than them
        exact = q.dtype == torch.float32 or not q.is_cuda
        config = default_config(
            nodes=nodes, values=dim_v, exact=exact, heads=batch * heads_v, overlap=_overlaps(q.device)
        )
    prepare, verify = constants_for(
        config, nodes=nodes, heads=(heads_k, heads_v), dims=(dim_k, dim_v), fold_threshold=window.fold_threshold,
        either=states.axis_order is not None,
    )  # fmt: skip
    carried_shape = (2 if config.split else 1, batch, heads_v, nodes, dim_k)
    carried = torch.empty(carried_shape, dtype=torch.bfloat16 if config.split else torch.float32, device=q.device)
    weights = torch.empty(batch, heads_v, nodes, prepare["BT"], dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(dim_v, config.block_v)
    factors = torch.empty((1 + tiles) * batch * heads_v, capacity, FACTORS.value, dtype=torch.float32, device=q.device)
    prepare_kernel[launch_grid(batch * heads_v)](
        q, k, a, b, A_log, dt_bias, scale, rows.slots, rows.rows, window.pending, window.newest, window.order,
        window.k, window.g, window.beta, rows.ancestors, carried, weights, factors, window.fold_threshold, capacity,
        q.stride(0), k.stride(0), a.stride(0), b.stride(0), rows.ancestors.stride(0),
        window.k.stride(0), window.k.stride(1), window.g.stride(0), window.g.stride(1),
        **prepare, num_warps=config.prepare_warps, enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
    _verify_kernel[launch_grid(batch * heads_v * tiles)](
        v, states.data, states.axis_order, rows.slots, rows.rows, window.pending, window.newest, window.order,
        window.k, window.v, window.g, window.beta, carried, weights, factors, out, window.fold_threshold, capacity,
        v.stride(0), states.data.stride(0),
        window.k.stride(0), window.k.stride(1), window.v.stride(0), window.v.stride(1),
        window.g.stride(0), window.g.stride(1),
        **verify, num_warps=config.num_warps, maxnreg=config.registers, launch_pdl=config.overlap,
        enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
    return out
