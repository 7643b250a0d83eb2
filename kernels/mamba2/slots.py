"""Mamba2 (SSD) target verify in slots mode: the plain recurrence, every node's state written to that node's own slot.

    S_i = S_parent(i) exp(A dt_i) + (B_i dt_i) x_i^T,    y_i = S_i C_i + D x_i,    y_i <- y_i silu(z_i)

A row starts from the state in its read slot, wherever its last verify left it; there is no copy and no scatter.

Outputs and states are bit for bit those of SGLang's selective_state_update (mamba_ssm.py) in target verify, whose
arithmetic this kernel follows operation by operation: along a chain the state stays in float32 registers, in a tree a
node continues from its parent's state as stored. The order in which a row's products with C are summed is that of the
tile in registers, so tiles and warps are SGLang's too. It changed them for dstate 65..128 in 0.5.21:
16-bit states sum in another order there (fp32 states do not), see arguments.stock_tiling.

Layouts: x, y, z [T, nheads, headdim], B, C [T, ngroups, dstate], token b*N+i is node i of batch row b; states
[S, nheads, headdim, dstate], or [S, nheads, dstate, headdim] in slots whose bit says KV. A program does BLOCK_P rows of
one head of one batch row, all nodes: nobody else reads or writes its part of any slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.checks import check_dtype, check_index, check_inner_contiguous, check_same_device, check_shape
from ..common.layout import VK
from ..common.tile import IS_KV, check_layout, load_state, store_state
from .arguments import SlotsTiling, per_head, stock_tiling

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["nodes", "write_layout"])
def _mamba2_slots_kernel(
    x,
    dt,
    B,
    C,
    A,
    D,
    dt_bias,
    z,
    y,
    states,
    state_layout,
    read_slots,
    write_slots,
    parents,
    nodes,
    write_layout,
    dt_low,
    dt_high,
    stride_x,
    stride_dt,
    stride_dt_head,
    stride_B,
    stride_C,
    stride_A,
    stride_D,
    stride_bias,
    stride_z,
    stride_y,
    stride_slot,
    stride_head,
    stride_dim,
    stride_write,
    stride_parents,
    HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    TREE: tl.constexpr,
    LAYOUTS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    group = head // HEADS_PER_GROUP
    dim = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_S)
    dim_inside = dim < HEADDIM
    state_inside = column < DSTATE
    tile_inside = dim_inside[:, None] & state_inside[None, :]
    token = b * nodes
    y_head = y + token * stride_y + head * HEADDIM + dim
    slot = tl.load(read_slots + b).to(tl.int64)
    if slot <= 0:
        for _ in range(nodes):
            tl.store(y_head, tl.zeros((BLOCK_P,), y.dtype.element_ty), mask=dim_inside)
            y_head += stride_y
        return

    states += head * stride_head
    # stride_dim is dstate: as a number the compiler does not know it gives it the vector width, and with it the order
    # of summation, that SGLang's kernel gets
    in_vk = states + dim[:, None] * stride_dim + column[None, :]
    in_kv = states + column[None, :] * HEADDIM + dim[:, None]
    is_kv = False
    write_kv = False
    if LAYOUTS:
        is_kv = tl.load(state_layout + slot) == IS_KV
        write_kv = write_layout == IS_KV  # not known to the compiler, or it would take the KV load for the last
    at = slot * stride_slot
    state = load_state(in_vk + at, in_kv + at, tile_inside, is_kv, LAYOUTS)

    x_head = x + token * stride_x + head * HEADDIM + dim
    z_head = x_head
    if z is not None:
        z_head = z + token * stride_z + head * HEADDIM + dim
    dt_head = dt + token * stride_dt + head * stride_dt_head
    B_group = B + token * stride_B + group * DSTATE + column
    C_group = C + token * stride_C + group * DSTATE + column
    write_slots += b * stride_write
    for node in range(nodes):
        if TREE:
            state = state.to(states.dtype.element_ty).to(tl.float32)
            parent = tl.load(parents + b * stride_parents + node)
            # a parent one node before is still in registers, as is what the root continues from
            if (node > 0) & (parent != node - 1):
                tl.debug_barrier()  # the tile may come back to other threads than stored it
                above = tl.load(write_slots + parent).to(tl.int64)
                at = above * stride_slot
                state = load_state(in_vk + at, in_kv + at, tile_inside & (above > 0), write_kv, LAYOUTS)
        x_node = tl.load(x_head, mask=dim_inside, other=0.0).to(tl.float32)
        step = tl.load(dt_head).to(tl.float32)
        if dt_bias is not None:
            step += tl.load(dt_bias + head * stride_bias).to(tl.float32)
        if SOFTPLUS:
            step = tl.where(step <= 20.0, tl.log(tl.exp(step) + 1), step)
        if LIMITS:
            step = tl.minimum(tl.maximum(step, dt_low), dt_high)
        decay = tl.exp(tl.load(A + head * stride_A).to(tl.float32) * step)
        B_node = tl.load(B_group, mask=state_inside, other=0.0).to(tl.float32)
        C_node = tl.load(C_group, mask=state_inside, other=0.0).to(tl.float32)
        state = state * decay + (B_node * step) * x_node[:, None]

        slot = tl.load(write_slots + node).to(tl.int64)
        at = slot * stride_slot
        store_state(in_vk + at, in_kv + at, state, tile_inside & (slot > 0), write_kv, LAYOUTS)

        out = tl.sum(state * C_node[None, :], axis=1)
        if D is not None:
            out += x_node * tl.load(D + head * stride_D).to(tl.float32)
        if z is not None:
            gate = tl.load(z_head, mask=dim_inside, other=0.0).to(tl.float32)
            out *= gate * tl.sigmoid(gate)
            z_head += stride_z
        tl.store(y_head, out, mask=dim_inside)
        x_head += stride_x
        dt_head += stride_dt
        B_group += stride_B
        C_group += stride_C
        y_head += stride_y


def mamba2_verify_slots(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limits: tuple[float, float] | None,
    z: torch.Tensor | None,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    parents: torch.Tensor | None,
    state_layout: torch.Tensor | None = None,
    write_layout: int = VK,
    out: torch.Tensor | None = None,
    tiling: SlotsTiling | None = None,
    sglang: tuple[int, ...] = (0, 5, 23),
) -> torch.Tensor:
    """Outputs of the B trees of N nodes; returns y [B*N, nheads, headdim] in x's dtype (or `out`, written in place).

    x, z        [B*N, nheads, headdim] float, last two dimensions contiguous, any token stride; z may be None.
    dt          [B*N, nheads] float, any strides, or expanded to [B*N, nheads, headdim]: raw, read.
    B, C        [B*N, ngroups, dstate] float, last two dimensions contiguous, any token stride. x, B, C: one dtype.
    A, D, dt_bias
                [nheads] float, or expanded to [nheads, headdim(, dstate)] with stride 0; D and dt_bias may be None.
    dt_softplus, dt_limits
                step size = clamp(softplus(dt + dt_bias), *dt_limits); dt_limits None: no clamp, as SGLang.
    states      [S, nheads, headdim, dstate] float, last two dimensions contiguous: read at `read_slots`, written at
                `write_slots`.
    read_slots  [B] int32 or int64: where each row's state is. slot <= 0 is padding: y zero, nothing written.
    write_slots [B, N] int32 or int64, any row stride: where the state after each node goes; <= 0: nowhere (not for a
                node with children in a tree). Distinct over the batch; one of a row's may be its own read slot, then
                in the same layout.
    parents     [>=B, N] int32 or int64, any row stride, of a tree in topological order: parents[b, i] in [0, i) for
                i > 0, the root's is not looked at. None: chains. These differ for a 16-bit state: a tree's nodes
                continue from a stored, rounded state, a chain's from an exact one.
    state_layout
                [S] uint8, VK or KV: the layout of each slot read. None: all VK.
    write_layout
                VK or KV: the layout of what is written; the caller sets state_layout. KV needs a state_layout.
    tiling      launch shape, None for that of the SGLang version whose bits are wanted (arguments.stock_tiling).

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    tokens, nheads, headdim = x.shape
    ngroups, dstate = B.shape[1], B.shape[2]
    check_shape("write_slots", write_slots, (None, None))
    batch, nodes = write_slots.shape
    if tokens != batch * nodes:
        raise ValueError(f"x: {tokens} tokens for {batch} rows of {nodes} nodes")
    if nheads % ngroups:
        raise ValueError(f"B: {ngroups} groups do not divide {nheads} heads")
    dt = per_head("dt", dt, 2)
    A = per_head("A", A, 1)
    D = None if D is None else per_head("D", D, 1)
    dt_bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)
    check_shape("dt", dt, (tokens, nheads))
    for name, tensor in {"A": A, "D": D, "dt_bias": dt_bias}.items():
        if tensor is not None:
            check_shape(name, tensor, (nheads,))
    check_shape("B", B, (tokens, ngroups, dstate))
    check_shape("C", C, (tokens, ngroups, dstate))
    check_shape("states", states, (None, nheads, headdim, dstate))
    y = torch.empty((tokens, nheads, headdim), dtype=x.dtype, device=x.device) if out is None else out
    check_shape("out", y, (tokens, nheads, headdim))
    blocks = {"x": x, "B": B, "C": C, "states": states, "out": y}
    if z is not None:
        check_shape("z", z, (tokens, nheads, headdim))
        blocks["z"] = z
    for name, tensor in blocks.items():
        check_dtype(name, tensor, FLOAT_DTYPES)
        check_inner_contiguous(name, tensor, 2)
    for name in ("B", "C"):
        check_dtype(name, blocks[name], (x.dtype,))
    check_index("read_slots", read_slots, batch)
    check_dtype("write_slots", write_slots, (torch.int32, torch.int64))
    check_inner_contiguous("write_slots", write_slots)
    if parents is not None:
        check_shape("parents", parents, (None, nodes))
        check_dtype("parents", parents, (torch.int32, torch.int64))
        check_inner_contiguous("parents", parents)
        if parents.shape[0] < batch:
            raise ValueError(f"parents: {parents.shape[0]} rows, batch is {batch}")
    check_layout(state_layout, states.shape[0], write_layout)
    check_same_device(
        dt=dt,
        A=A,
        D=D,
        dt_bias=dt_bias,
        read_slots=read_slots,
        write_slots=write_slots,
        parents=parents,
        state_layout=state_layout,
        **blocks,
    )
    if tokens == 0:
        return y
    tiling = tiling or stock_tiling(dstate, sglang)
    low, high = dt_limits or (0.0, 0.0)
    _mamba2_slots_kernel[(triton.cdiv(headdim, tiling.block_p), batch, nheads)](
        x,
        dt,
        B,
        C,
        A,
        D,
        dt_bias,
        z,
        y,
        states,
        state_layout,
        read_slots,
        write_slots,
        parents,
        nodes,
        write_layout,
        float(low),
        float(high),
        x.stride(0),
        dt.stride(0),
        dt.stride(1),
        B.stride(0),
        C.stride(0),
        A.stride(0),
        0 if D is None else D.stride(0),
        0 if dt_bias is None else dt_bias.stride(0),
        0 if z is None else z.stride(0),
        y.stride(0),
        states.stride(0),
        states.stride(1),
        states.stride(2),
        write_slots.stride(0),
        0 if parents is None else parents.stride(0),
        HEADS_PER_GROUP=nheads // ngroups,
        HEADDIM=headdim,
        DSTATE=dstate,
        TREE=parents is not None,
        LAYOUTS=state_layout is not None,
        SOFTPLUS=dt_softplus,
        LIMITS=dt_limits is not None,
        BLOCK_P=tiling.block_p,
        BLOCK_S=triton.next_power_of_2(dstate),
        num_warps=tiling.num_warps,
        # rows that cannot be read as vectors leave a lane one element: gdn/tiles.py says what contraction does then
        enable_fp_fusion=dstate % 16 == 0,
    )
    return y
