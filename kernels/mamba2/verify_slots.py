"""Mamba2 (SSD) target verify in slots mode: the plain recurrence, every node's state written to that node's own slot.

    S_i = S_parent(i) exp(A dt_i) + (B_i dt_i) x_i^T,    y_i = S_i C_i + D x_i

A row starts from the state in its read slot, wherever its last verify left it; there is no copy and no scatter. That
slot may be one of those written, in slots mode the root's: it is read into registers before anything is stored, and
children of the root that read their parent's slot want the root's state.

Outputs and states are bit for bit those of SGLang's selective_state_update (mamba_ssm.py) in target verify, whose
arithmetic this kernel follows operation by operation: along a chain the state stays in float32 registers, in a tree a
node continues from its parent's state as stored. The order in which a row's products with C are summed is that of the
tile in registers, so tiles and warps are SGLang's too. It changed them for dstate 65..128 in 0.5.21:
16-bit states sum in another order there (fp32 states do not), see arguments.stock_tiling.

Layouts: x, y [T, nheads, headdim], B, C [T, ngroups, dstate], token b*N+i is node i of batch row b; states
[S, nheads, headdim, dstate], or [S, nheads, dstate, headdim] in slots that lie as KV; each is written as it lies. A
program does BLOCK_P rows of one head of one batch row, all nodes: nobody else reads or writes its part of any slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.grid import launch_grid
from ..common.operands import NodeSlots, States
from ..common.tile import IS_KV, load_state, store_state
from .arguments import SlotsTiling, check_groups, parameters, stock_tiling


@triton.jit(do_not_specialize=["nodes"])
def _mamba2_slots_kernel(
    x,
    dt,
    B,
    C,
    A,
    D,
    dt_bias,
    y,
    states,
    axis_order,
    read_slots,
    write_slots,
    parents,
    nodes,
    stride_x,
    stride_dt,
    stride_dt_head,
    stride_B,
    stride_C,
    stride_A,
    stride_D,
    stride_bias,
    stride_y,
    stride_slot,
    stride_head,
    stride_dim,
    stride_write,
    stride_parents,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    TREE: tl.constexpr,
    EITHER: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    blocks: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // blocks % HEADS
    b = (tl.program_id(0) // (blocks * HEADS)).to(tl.int64)
    group = head // HEADS_PER_GROUP
    dim = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
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
    if EITHER:
        is_kv = tl.load(axis_order + slot) == IS_KV
    at = slot * stride_slot
    state = load_state(in_vk + at, in_kv + at, tile_inside, is_kv, EITHER)

    x_head = x + token * stride_x + head * HEADDIM + dim
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
                if EITHER:
                    is_kv = tl.load(axis_order + above, mask=above > 0, other=0) == IS_KV
                state = load_state(in_vk + at, in_kv + at, tile_inside & (above > 0), is_kv, EITHER)
        x_node = tl.load(x_head, mask=dim_inside, other=0.0).to(tl.float32)
        step = tl.load(dt_head).to(tl.float32)
        if dt_bias is not None:
            step += tl.load(dt_bias + head * stride_bias).to(tl.float32)
        if SOFTPLUS:
            step = tl.where(step <= 20.0, tl.log(tl.exp(step) + 1), step)
        decay = tl.exp(tl.load(A + head * stride_A).to(tl.float32) * step)
        B_node = tl.load(B_group, mask=state_inside, other=0.0).to(tl.float32)
        C_node = tl.load(C_group, mask=state_inside, other=0.0).to(tl.float32)
        state = state * decay + (B_node * step) * x_node[:, None]

        slot = tl.load(write_slots + node).to(tl.int64)
        at = slot * stride_slot
        if EITHER:
            is_kv = tl.load(axis_order + slot, mask=slot > 0, other=0) == IS_KV
        store_state(in_vk + at, in_kv + at, state, tile_inside & (slot > 0), is_kv, EITHER)

        out = tl.sum(state * C_node[None, :], axis=1)
        if D is not None:
            out += x_node * tl.load(D + head * stride_D).to(tl.float32)
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
    states: States,
    nodes: NodeSlots,
    out: torch.Tensor | None = None,
    tiling: SlotsTiling | None = None,
    sglang: tuple[int, ...] = (0, 5, 23),
) -> torch.Tensor:
    """Outputs of the B trees of N nodes; returns y [B*N, H, P] in x's dtype (or `out`, written in place).

    x           [B*N, H, P] float, last two dimensions contiguous, any token stride: read.
    dt          [B*N, H] float, any strides, or expanded to [B*N, H, P]: raw, read.
    B, C        [B*N, G, D] of x's dtype, last two dimensions contiguous, any token stride: read.
    A, D, dt_bias
                [H] float, or expanded to [H, P(, D)] with stride 0; D and dt_bias may be None.
    dt_softplus whether the step size is softplus(dt + dt_bias), or dt + dt_bias.
    states      one layer's, [S, H, P, D]: read at nodes.read, written at nodes.write, each slot as it lies.
    nodes       of chains and of trees: these differ for a 16-bit state. A tree's nodes continue from a stored, rounded
                state, a chain's from an exact one.
    out         [B*N, H, P] float, last two dimensions contiguous, any token stride.
    tiling      launch shape, None for that of the SGLang version whose bits are wanted (arguments.stock_tiling).

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    dt, A, D, dt_bias = parameters(dt, A, D, dt_bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    sizes = check(
        read_slots=Arg(nodes.read, "B"),
        write_slots=Arg(nodes.write, ">=B N"),
        parents=Arg(nodes.parents, ">=B N"),
        x=Arg(x, "B*N H P", FLOATS, contiguous=2),
        dt=Arg(dt, "B*N H", FLOATS, contiguous=0),
        B=Arg(B, "B*N G D", x.dtype, contiguous=2),
        C=Arg(C, "B*N G D", x.dtype, contiguous=2),
        A=Arg(A, "H", FLOATS, contiguous=0),
        D=Arg(D, "H", FLOATS, contiguous=0),
        dt_bias=Arg(dt_bias, "H", FLOATS, contiguous=0),
        states=Arg(states.data, "S H P D", FLOATS, contiguous=2),
        axis_order=Arg(states.axis_order, "S"),
        out=Arg(y, "B*N H P", FLOATS, contiguous=2),
    )
    batch, node_count, nheads, headdim, ngroups, dstate = sizes.get_all("B N H P G D")
    check_groups(nheads, ngroups)
    if x.shape[0] == 0:
        return y
    tiling = tiling or stock_tiling(dstate, sglang)
    _mamba2_slots_kernel[launch_grid(batch * nheads * triton.cdiv(headdim, tiling.block_p))](
        x, dt, B, C, A, D, dt_bias, y, states.data, states.axis_order, nodes.read, nodes.write, nodes.parents,
        node_count,
        x.stride(0), dt.stride(0), dt.stride(1), B.stride(0), C.stride(0), A.stride(0),
        0 if D is None else D.stride(0), 0 if dt_bias is None else dt_bias.stride(0), y.stride(0),
        states.data.stride(0), states.data.stride(1), states.data.stride(2), nodes.write.stride(0),
        0 if nodes.parents is None else nodes.parents.stride(0),
        HEADS=nheads,
        HEADS_PER_GROUP=nheads // ngroups,
        HEADDIM=headdim,
        DSTATE=dstate,
        TREE=nodes.parents is not None,
        EITHER=states.axis_order is not None,
        SOFTPLUS=dt_softplus,
        BLOCK_P=tiling.block_p,
        BLOCK_S=triton.next_power_of_2(dstate),
        num_warps=tiling.num_warps,
        # rows that cannot be read as vectors leave a lane one element: gdn/tiles.py says what contraction does then
        enable_fp_fusion=dstate % 16 == 0,
    )  # fmt: skip
    return y
