"""GDN target verify by replay: outputs of all draft nodes of a row from one read of its state.

prepare.py, or prepare_products.py, turns query i into x_i and one weight y_it per window token, so that
    o_i = S0 x_i + sum_t y_it v_t        (t over the pending tokens, the node's ancestors and the node)
with S0 the checkpoint. This kernel streams S0 past the x of all nodes. Their keys and values lie in the window already,
where the convolution has put them (conv1d/verify_replay.py). A row with more than `fold_threshold` pending tokens folds
the oldest into its checkpoint first, as many as common/pending.py says, exactly (fold_tile.py), and its outputs start
from the state as written; tokens that a fold leaves pending are read as those of other rows are.

A program owns one value head of one row (or some of its blocks of values): it keeps x and y in registers while the
state comes past, from the registers it is loaded to into tensor cores. Programs share nothing they write.

Precision: 16-bit keys and values are exact on tensor cores; x, y and the state go in addends (common/fragments.py), two
for an output of 16 bits and three where the state is folded, unless it is bf16 and so as exact as it lies. float32
inputs: products of 22 bits.

Shapes: checkpoint [S, HV, V, K], or [S, HV, K, V] in slots whose bit says so (common/tile.py); window_k [R, C, H, K],
window_v [R, C, HV, V], window_g and window_beta [R, C, HV].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.ask import ask, line_starts
from ..common.dependent import has_dependent_launch
from ..common.fragments import (
    addends,
    as_left,
    inside,
    load_right_in_product_order,
    multiply,
    per_column,
    per_row,
    state_addends,
    tile_column,
    tile_row,
)
from ..common.grid import launch_grid
from ..common.operands import Rows, States, check_nodes
from ..common.pending import pending_and_folding
from ..common.tile import IS_KV
from .arguments import check_groups, node_inputs
from .config import VerifyConfig, constants_for, default_config
from .fold_tile import STEP_FLOATS, TOKENS, fold_step, load_factors, step_keys, step_tokens
from .prepare import prepare_kernel
from .prepare_products import can_take_products, prepare_products_kernel
from .tiles import may_fuse
from .window import GdnWindow


@triton.jit
def _prepared(
    carried, weights, head, node_i, token, is_token,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr, PARTNER: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """What prepare.py has left for a head: x [PART, node] in addends, columns renamed, PARTS times; y [token, node] in
    addends for values of type PARTNER."""
    is_i = node_i < N
    x_head = carried + head.to(tl.int64) * (N * K)
    queries = ()
    for part in tl.static_range(PARTS):
        at = (node_i, is_i, part * PART)
        x = load_right_in_product_order(x_head, K, at, K, PART, CHUNK)
        if SPLIT:
            # carried holds the high halves of all rows, then the low ones
            low_head = x_head + tl.num_programs(0).to(tl.int64) * (N * K)
            low = load_right_in_product_order(low_head, K, at, K, PART, CHUNK)
            queries = queries + ((low, x),)  # noqa: RUF005
        else:
            queries = queries + ((x,),)  # noqa: RUF005
    at = weights + head.to(tl.int64) * (BT * N) + token[:, None] * N + node_i[None, :]
    y = tl.load(at, mask=is_i[None, :] & is_token[:, None], other=0.0)
    return queries, addends(y, PARTNER, COUNT)


@triton.jit
def _in_float32(tiles):
    wide = ()
    for part in tl.static_range(len(tiles)):
        wide = wide + (tiles[part].to(tl.float32),)  # noqa: RUF005 (jit code has no unpacking)
    return wide


@triton.jit
def _fold_step(
    tiles, position, live, keys, factors, window_v_head, stride_wv, dim, dim_inside,
    CHUNK: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """fold_step with the values of the window."""
    values = tl.load(
        window_v_head + position[None, :] * stride_wv + dim[:, None],
        mask=live[None, :] & dim_inside[:, None],
        other=0.0,
    )
    return fold_step(tiles, values, keys, factors, CHUNK, WARPS, NATIVE)


@triton.jit
def _pointers(
    state_head, tile_v, tile_k, V_INSIDE,
    K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, LIES_KV: tl.constexpr,
):  # fmt: skip
    """Pointers of a tile of a head's state, and which of them are inside."""
    if LIES_KV:
        at = state_head + (per_row(tile_v) + per_column(tile_k) * V)
    else:
        at = state_head + (per_row(tile_v) * K + per_column(tile_k))
    return at, per_row(V_INSIDE) & per_column(inside(tile_k, K, K % PART == 0))


@triton.jit
def _stream(
    state_head, first_block, head, tokens, inputs, prepared, fold,
    N: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LIES_KV: tl.constexpr, FOLDS: tl.constexpr,
    BI: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, FOLD_STEPS: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
    NATIVE: tl.constexpr, OVERLAP: tl.constexpr, STAGES: tl.constexpr, FOLD_STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of some blocks of one head's values, folded first if FOLDS.

    tokens: which there are, and where in the window. inputs: this head's window, its stride, and this head's outputs.
    prepared: what prepare.py writes. fold: what the pending tokens' fold needs.
    """
    token, position, is_token = tokens
    window_v_head, stride_wv, out_head = inputs
    carried, weights, factors_head = prepared
    folding, order, k_head, stride_wk = fold
    node_i = tl.arange(0, BI)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    COUNT: tl.constexpr = 2 if SPLIT else 3
    queries, weights = _prepared(
        carried, weights, head, node_i, token, is_token,
        N, K, BT, PARTS, PART, CHUNK, SPLIT, window_v_head.dtype.element_ty, COUNT,
    )  # fmt: skip
    PARTNER: tl.constexpr = carried.dtype.element_ty
    if FOLDS and FOLD_STEPS == 1:
        at_step, live = step_tokens(0, folding, order)
        keys = step_keys(k_head, stride_wk, at_step, live, K, PARTS, PART, CHUNK)
        factors = load_factors(factors_head)
    for block in tl.range(first_block, first_block + BLOCKS, num_stages=FOLD_STAGES if FOLDS else STAGES):
        dim = block * BP + tl.arange(0, BP)
        dim_inside = inside(dim, V, V % (BP * BLOCKS) == 0)
        # [dims, tokens], as the product takes it: turned after the load, it would go through shared memory twice
        at_values = window_v_head + position[None, :] * stride_wv + dim[:, None]
        values = tl.load(at_values, mask=is_token[None, :] & dim_inside[:, None], other=0.0)
        output = multiply((values,), weights, NATIVE)

        tile_v = block * BP + tile_row(BP, WARPS)
        tile_inside = inside(tile_v, V, V % (BP * BLOCKS) == 0)
        tiles = ()
        for part in tl.static_range(PARTS):
            tile_k = part * PART + tile_column(PART, CHUNK)
            at, mask = _pointers(state_head, tile_v, tile_k, tile_inside, K, V, PART, LIES_KV)
            tiles = tiles + (tl.load(at, mask=mask, other=0.0),)  # noqa: RUF005
        if FOLDS:
            if FOLD_STEPS == 1:
                tiles = _fold_step(
                    tiles, at_step, live, keys, factors, window_v_head, stride_wv, dim, dim_inside,
                    CHUNK, WARPS, NATIVE,
                )  # fmt: skip
            else:
                tiles = _in_float32(tiles)
                for start in tl.range(0, folding, TOKENS, num_stages=1):
                    at_step, live = step_tokens(start, folding, order)
                    keys = step_keys(k_head, stride_wk, at_step, live, K, PARTS, PART, CHUNK)
                    factors = load_factors(factors_head + start // TOKENS * STEP_FLOATS)
                    tiles = _fold_step(
                        tiles, at_step, live, keys, factors, window_v_head, stride_wv, dim, dim_inside,
                        CHUNK, WARPS, NATIVE,
                    )  # fmt: skip
            # outputs start from what is written, as the next verify's will
            written = ()
            for part in tl.static_range(PARTS):
                tile_k = part * PART + tile_column(PART, CHUNK)
                at, mask = _pointers(state_head, tile_v, tile_k, tile_inside, K, V, PART, LIES_KV)
                written = written + (tiles[part].to(state_head.dtype.element_ty),)  # noqa: RUF005
                tl.store(at, written[part], mask=mask)
            tiles = written
        from_state = tl.zeros([BP, BI], tl.float32)
        for part in tl.static_range(PARTS):
            left = state_addends(as_left(tiles[part], WARPS), PARTNER, COUNT)
            # a plain sum would become the product's accumulator, which is cut short in every step
            from_state = tl.fma(multiply(left, queries[part], NATIVE), 1.0, from_state)
        output = tl.fma(from_state, 1.0, output)
        tl.store(
            out_head + node_i[None, :] * (HV * V) + dim[:, None],
            output.to(out_head.dtype.element_ty),
            mask=(node_i < N)[None, :] & dim_inside[:, None],
        )


@triton.jit
def _stream_path(
    place, kept, inputs, prepared, fold,
    N: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BI: tl.constexpr, TOKEN_TILE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr, FOLD_STEPS: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr, NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr, STAGES: tl.constexpr, FOLD_STAGES: tl.constexpr, EITHER: tl.constexpr,
):  # fmt: skip
    """_stream with the tokens of a path in a tile of TOKEN_TILE, as the head's state lies and with the fold it is due.

    The path: what stays pending (kept), then the nodes. place: the head's state,
    the first block, the head's number, and whether its state lies as KV.
    """
    state_head, first_block, head, is_kv = place
    folding, order, _, _ = fold
    token = tl.arange(0, TOKEN_TILE)
    is_token = token < kept + N
    position = tl.load(order + folding + token, mask=is_token, other=0).to(tl.int64)
    tokens = (token, position, is_token)
    if folding > 0:
        if EITHER and is_kv:
            _stream(
                state_head, first_block, head, tokens, inputs, prepared, fold, N, HV, K, V, True, True, BI, BT,
                BP, BLOCKS, PARTS, PART, CHUNK, FOLD_STEPS, WARPS, SPLIT, NATIVE, OVERLAP, STAGES, FOLD_STAGES,
            )  # fmt: skip
        else:
            _stream(
                state_head, first_block, head, tokens, inputs, prepared, fold, N, HV, K, V, False, True, BI, BT,
                BP, BLOCKS, PARTS, PART, CHUNK, FOLD_STEPS, WARPS, SPLIT, NATIVE, OVERLAP, STAGES, FOLD_STAGES,
            )  # fmt: skip
    elif EITHER and is_kv:
        _stream(
            state_head, first_block, head, tokens, inputs, prepared, fold, N, HV, K, V, True, False, BI, BT,
            BP, BLOCKS, PARTS, PART, CHUNK, FOLD_STEPS, WARPS, SPLIT, NATIVE, OVERLAP, STAGES, FOLD_STAGES,
        )  # fmt: skip
    else:
        _stream(
            state_head, first_block, head, tokens, inputs, prepared, fold, N, HV, K, V, False, False, BI, BT,
            BP, BLOCKS, PARTS, PART, CHUNK, FOLD_STEPS, WARPS, SPLIT, NATIVE, OVERLAP, STAGES, FOLD_STAGES,
        )  # fmt: skip


@triton.jit
def _verify_kernel(
    states, axis_order, slots, rows, schedule, pending, newest, order, window_k, window_v, carried, weights,
    fold_factors, out, fold_threshold, fold_at_once, capacity,
    stride_slot, stride_wk_row, stride_wk, stride_wv_row, stride_wv,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BI: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, FOLD_STEPS: tl.constexpr, WARPS: tl.constexpr,
    SPLIT: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr, STAGES: tl.constexpr,
    FOLD_STAGES: tl.constexpr, EITHER: tl.constexpr, FITS_HALF: tl.constexpr,
):  # fmt: skip
    batch_row = tl.program_id(0) // HV
    if schedule is not None:
        batch_row = tl.load(schedule + batch_row)
    hv = tl.program_id(0) % HV
    head = batch_row * HV + hv  # of all rows
    batch_row = batch_row.to(tl.int64)
    first_block = tl.program_id(1) * BLOCKS
    out_head = out + batch_row * N * (HV * V) + hv * V

    slot = tl.load(slots + batch_row).to(tl.int64)
    if slot <= 0:
        if OVERLAP:
            # whoever waits for this kernel waits for those before it too; and outputs may lie where one of them reads
            tl.extra.cuda.gdc_wait()
        node_i = tl.arange(0, BI)
        for block in range(first_block, first_block + BLOCKS):
            dim = block * BP + tl.arange(0, BP)
            zeros = tl.zeros([BP, BI], out.dtype.element_ty)
            mask = (node_i < N)[None, :] & (dim < V)[:, None]
            tl.store(out_head + node_i[None, :] * (HV * V) + dim[:, None], zeros, mask=mask)
        return
    state_head = states + slot * stride_slot + hv * (V * K)
    # the first block (of a slot that lies as [K, V], a part of it), while all that is read before it is on its way
    first_element = first_block * (BP * K)
    ask(state_head + first_element + line_starts(states.dtype.element_ty, BLOCK, V * K - first_element), NATIVE)
    row = tl.load(rows + batch_row).to(tl.int64)
    before, folding = pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once)
    kept = before - folding
    is_kv = False
    if EITHER:
        is_kv = tl.load(axis_order + slot) == IS_KV
    order += row * capacity
    k_head = window_k + row * stride_wk_row + hv // (HV // H) * K
    inputs = (window_v + row * stride_wv_row + hv * V, stride_wv, out_head)
    prepared = (carried, weights, fold_factors + head.to(tl.int64) * (FOLD_STEPS * STEP_FLOATS))
    fold = (folding, order, k_head, stride_wk)
    place = (state_head, first_block, head, is_kv)
    if FITS_HALF and kept <= BT // 2 - N:
        _stream_path(
            place, kept, inputs, prepared, fold, N, HV, K, V, BI, BT // 2, BT, BP, BLOCKS, PARTS, PART, CHUNK,
            FOLD_STEPS, WARPS, SPLIT, NATIVE, OVERLAP, STAGES, FOLD_STAGES, EITHER,
        )  # fmt: skip
    else:
        _stream_path(
            place, kept, inputs, prepared, fold, N, HV, K, V, BI, BT, BT, BP, BLOCKS, PARTS, PART, CHUNK,
            FOLD_STEPS, WARPS, SPLIT, NATIVE, OVERLAP, STAGES, FOLD_STAGES, EITHER,
        )  # fmt: skip


def gdn_verify(
    q: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    states: States,
    rows: Rows,
    window: GdnWindow,
    after_convolution: bool = False,
    config: VerifyConfig | None = None,
) -> torch.Tensor:
    """Score the N draft nodes of each of B rows against state + pending tokens; returns o [B*N, HV, V] in q's dtype.

    q        [B*N, H, K] float, heads contiguous, any token stride: read, after the convolution, before normalisation.
    a, b     [B*N, HV] float, inner contiguous, any token stride: read, raw gate inputs.
    A_log, dt_bias
             [HV] float: read.
    scale    multiplies normalised q.
    states   [S, HV, V, K], each slot contiguous: read at the slots; rows that fold are written in place, in the axis
             order they have.
    rows     slots, rows, ancestors and schedule are read; outputs of padding are zero.
    window   of one layer: at the rows, pending tokens are read, and of node i of row r, which is at
             order[r, pending + i], k and v too: after the convolution, before normalisation. g, beta and factors of the
             nodes are written there, in float32. pending stays as it is.
    after_convolution
             the kernel launched before this one on the stream, conv1d_verify as a rule, writes nothing of a, b, the
             rows, the states, nor of the window but inputs of nodes: all these may be read while it runs, where
             config.overlap.
    config   how to cut it up; None: the default.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        slots=Arg(rows.slots, "B"),
        ancestors=Arg(rows.ancestors, ">=B N"),
        schedule=Arg(rows.schedule, ">=B"),
        **node_inputs(q, a, b, A_log, dt_bias),
        states=Arg(states.data, "S HV V K", FLOATS, contiguous=3),
        axis_order=Arg(states.axis_order, "S"),
        pending=Arg(window.pending, "S"),
        order=Arg(window.order, "R C"),
        **window.inputs_as("R C"),
    )
    batch, nodes, heads_k, heads_v, dim_k, dim_v, capacity = sizes.get_all("B N H HV K V C")
    for name, tensor in (("window_k", window.k), ("window_v", window.v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {tensor.dtype}, expected q's {q.dtype}")
    check_groups("a", heads_v, heads_k)
    check_nodes(nodes)
    window.check_room(nodes)

    out = torch.empty(batch * nodes, heads_v, dim_v, dtype=q.dtype, device=q.device)
    if batch == 0 or nodes == 0:
        return out
    if config is None:
        config = default_config(
            nodes=nodes, values=dim_v, exact=q.dtype == torch.float32, fold_threshold=window.fold_threshold,
            heads=batch * heads_v, narrow=states.data.element_size() == 2, overlap=has_dependent_launch(q.device),
            products=can_take_products(q, window, nodes),
        )  # fmt: skip
    prepare, verify = constants_for(
        config, nodes=nodes, heads=(heads_k, heads_v), dims=(dim_k, dim_v), fold_threshold=window.fold_threshold,
        fold_at_once=window.fold_at_once, state=states.data.dtype, either=states.axis_order is not None,
        capacity=capacity,
    )  # fmt: skip
    carried_shape = (2 if config.split else 1, batch, heads_v, nodes, dim_k)
    carried = torch.empty(carried_shape, dtype=torch.bfloat16 if config.split else torch.float32, device=q.device)
    weights = torch.empty(batch, heads_v, prepare["BT"], nodes, dtype=torch.float32, device=q.device)
    folds = torch.empty(batch * heads_v, prepare["FOLD_STEPS"], STEP_FLOATS.value, dtype=torch.float32, device=q.device)
    arguments = {
        "q": q, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "scale": scale,
        "slots": rows.slots, "rows": rows.rows, "pending": window.pending, "newest": window.newest,
        "order": window.order, "window_k": window.k, "window_g": window.g, "window_beta": window.beta,
        "window_factors": window.factors, "ancestors": rows.ancestors, "carried": carried, "weights": weights,
        "fold_factors": folds, "fold_threshold": window.fold_threshold, "fold_at_once": window.fold_at_once,
        "capacity": capacity, "stride_q": q.stride(0), "stride_a": a.stride(0), "stride_b": b.stride(0),
        "stride_ancestors": rows.ancestors.stride(0), "stride_wk_row": window.k.stride(0),
        "stride_wk": window.k.stride(1), "stride_gate_row": window.g.stride(0), "stride_gate": window.g.stride(1),
        "stride_factors_row": window.factors.stride(0), "stride_factors": window.factors.stride(1),
    }  # fmt: skip
    options = {
        "num_warps": config.prepare_warps, "maxnreg": config.prepare_registers,
        "launch_pdl": config.overlap and after_convolution, "enable_fp_fusion": may_fuse(dim_k),
    }  # fmt: skip
    if config.products:
        programs = heads_k * triton.cdiv(heads_v // heads_k, prepare["HEADS"])
        prepare_products_kernel[launch_grid(batch * programs, 2)](
            schedule=rows.schedule, **arguments, **prepare, **options
        )
    else:
        heads = launch_grid(batch * heads_v, 2 if config.apart else 1)
        prepare_kernel[heads](**arguments, **prepare, **options)
    _verify_kernel[launch_grid(batch * heads_v, triton.cdiv(dim_v, config.block_v * config.blocks))](
        states.data, states.axis_order, rows.slots, rows.rows, rows.schedule, window.pending, window.newest,
        window.order, window.k, window.v, carried, weights, folds, out, window.fold_threshold, window.fold_at_once,
        capacity, states.data.stride(0),
        window.k.stride(0), window.k.stride(1), window.v.stride(0), window.v.stride(1),
        **verify, num_warps=config.num_warps, maxnreg=config.registers,
        launch_pdl=config.overlap, enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
    return out
