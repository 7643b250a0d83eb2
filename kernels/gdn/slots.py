"""GDN target verify in slots mode: the plain recurrence, every node's state written to that node's own slot.

    S_i = e^{g_i} S_parent(i);  S_i += beta_i (v_i - S_i k_i) k_i^T;  o_i = scale S_i q_i        (q, k normalised)
A row starts from the state in its read slot, wherever its last verify left it; there is no copy and no scatter.

Outputs and states are bit for bit those of SGLang's fused_sigmoid_gating_recurrent.py in target verify, whose
arithmetic this kernel follows operation by operation: a column of state per lane group in one warp, float32 throughout;
along a chain the state stays in registers, in a tree a node continues from its parent's state as stored. Up to 0.5.21
SGLang divides q and k by their norms, later it multiplies by the norm's reciprocal; on a GPU both are that product.

Layouts: states [S, HV, V, K], or [S, HV, K, V] in slots whose bit says so (common/tile.py). One program does one (row,
value head, tile of values), all nodes: nobody else reads or writes its part of any slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.checks import (
    INDEX_DTYPES,
    check_dtype,
    check_index,
    check_inner_contiguous,
    check_same_device,
    check_shape,
)
from ..common.layout import VK
from ..common.tile import IS_KV, check_layout, load_state, store_state
from .tiles import may_fuse

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _normalised(x):
    return x * (1.0 / tl.sqrt(tl.sum(x * x) + 1e-6))


@triton.jit(do_not_specialize=["nodes", "write_layout"])
def _slots_kernel(
    q, k, v, a, b, A_log, dt_bias, scale, states, state_layout, read_slots, write_slots, parents, out,
    nodes, write_layout, stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_write, stride_parents,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TREE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    hv = tl.program_id(1)
    h = hv // (HV // H)
    batch_row = tl.program_id(2).to(tl.int64)
    offs_k = tl.arange(0, BK)
    offs_v = tl.program_id(0) * BV + tl.arange(0, BV)
    mask_k = offs_k < K
    mask_v = offs_v < V
    mask_state = mask_k[:, None] & mask_v[None, :]
    token = batch_row * nodes
    p_out = out + (token * HV + hv) * V + offs_v

    slot = tl.load(read_slots + batch_row).to(tl.int64)
    live_nodes = tl.where(slot > 0, nodes, 0)
    for node in range(live_nodes, nodes):
        tl.store(p_out + node * (HV * V), tl.zeros([BV], dtype=out.dtype.element_ty), mask=mask_v)
    states += hv * (V * K)
    in_vk = offs_v[None, :] * K + offs_k[:, None]
    in_kv = offs_k[:, None] * V + offs_v[None, :]
    is_kv = False
    write_kv = False
    if LAYOUTS:
        is_kv = tl.load(state_layout + slot, mask=slot > 0, other=0) == IS_KV
        write_kv = write_layout == IS_KV
    # added to zeros, and what a branch leaves: as in SGLang's kernel, lest the compiler contract other products of the
    # sums than there (test_slots_arithmetic.py)
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if slot > 0:
        p_slot = states + slot * stride_slot
        state += load_state(p_slot + in_vk, p_slot + in_kv, mask_state, is_kv, LAYOUTS)

    p_q = q + token * stride_q + h * K + offs_k
    p_k = k + token * stride_k + h * K + offs_k
    p_v = v + token * stride_v + hv * V + offs_v
    p_a = a + token * stride_a + hv
    p_b = b + token * stride_b + hv
    write_slots += batch_row * stride_write
    for node in range(0, live_nodes):
        if TREE:
            state = state.to(states.dtype.element_ty).to(tl.float32)
            parent = tl.load(parents + batch_row * stride_parents + node)
            # a parent one node before is still in registers, as is what the root continues from
            if (node > 0) & (parent != node - 1):
                tl.debug_barrier()
                p_slot = states + tl.load(write_slots + parent).to(tl.int64) * stride_slot
                state = load_state(p_slot + in_vk, p_slot + in_kv, mask_state, write_kv, LAYOUTS)
        query = tl.load(p_q, mask=mask_k, other=0).to(tl.float32)
        key = tl.load(p_k, mask=mask_k, other=0).to(tl.float32)
        value = tl.load(p_v, mask=mask_v, other=0).to(tl.float32)
        x = tl.load(p_a).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
        softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
        g = -tl.exp(tl.load(A_log + hv).to(tl.float32)) * softplus
        beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b).to(tl.float32)))
        query = _normalised(query)
        key = _normalised(key)
        query = query * scale

        state *= tl.exp(g)
        value -= tl.sum(state * key[:, None], 0)
        value *= beta
        state += key[:, None] * value[None, :]
        tl.store(p_out, tl.sum(state * query[:, None], 0).to(out.dtype.element_ty), mask=mask_v)
        slot = tl.load(write_slots + node).to(tl.int64)
        if slot > 0:
            written = state.to(states.dtype.element_ty)
            p_slot = states + slot * stride_slot
            store_state(p_slot + in_vk, p_slot + in_kv, written, mask_state, write_kv, LAYOUTS)
        p_q += stride_q
        p_k += stride_k
        p_v += stride_v
        p_a += stride_a
        p_b += stride_b
        p_out += HV * V


@dataclass(frozen=True)
class SlotsConfig:
    """How gdn_verify_slots is cut up: block_v values a program, a power of two.

    Bits may depend on it: a compiler lays sums out by the tile.
    """

    block_v: int


def default_config(
    *, batch: int, dims: tuple[int, int], layouts: bool, hopper: bool, sglang: tuple[int, ...] = (0, 5, 23)
) -> SlotsConfig:
    """The configuration gdn_verify_slots uses: dims (K, V); layouts: a state_layout is given; hopper: compute 9.x;
    sglang: the version whose bits are wanted.

    SGLang's rule, which 0.5.22 changed, so that the compiler meets the tiles whose sums it is to repeat: on an H100 a
    chain of narrow tiles sums otherwise than one of wide tiles. The columns of a wide tile that may turn its layout
    take more registers than there are.
    """
    key, value = dims
    if (key, value) != (128, 128):
        return SlotsConfig(min(triton.next_power_of_2(value), 32))
    if layouts:
        return SlotsConfig(8)
    return SlotsConfig(4 if hopper and batch <= 64 and sglang >= (0, 5, 22) else 32)


def constants_for(
    config: SlotsConfig, *, heads: tuple[int, int], dims: tuple[int, int], tree: bool, layouts: bool
) -> dict[str, int]:
    """Compile-time arguments of the kernel: heads (H, HV), dims (K, V)."""
    return {
        "H": heads[0], "HV": heads[1], "K": dims[0], "V": dims[1], "BK": triton.next_power_of_2(dims[0]),
        "BV": config.block_v, "TREE": tree, "LAYOUTS": layouts,
    }  # fmt: skip


def gdn_verify_slots(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    parents: torch.Tensor | None,
    state_layout: torch.Tensor | None = None,
    write_layout: int = VK,
    config: SlotsConfig | None = None,
    sglang: tuple[int, ...] = (0, 5, 23),
) -> torch.Tensor:
    """Score the N draft nodes of each of B rows from the state in its read slot; a state a node to its write slot.

    Read:
        q, k [B*N, H, K], v [B*N, HV, V]: after the conv, before normalisation; any token stride, heads contiguous.
        a, b [B*N, HV]: raw gate inputs, any token stride. A_log, dt_bias [HV]. scale multiplies normalised q.
        read_slots [B] int32 or int64. <= 0 is padding: zeros out, nothing written.
        parents [>=B, N] int32 or int64, any row stride: -1 at the root, else a node before; None for chains.
        state_layout [S] uint8: layout (common/layout.py) of each slot read; None: all VK. The caller sets the bits of
        write slots to write_layout afterwards; KV needs a state_layout.
    Written:
        states[write_slots[b, i]] [S, HV, V, K] (any slot stride) of node i. write_slots [>=B, N] int32 or int64, any
        row stride; <= 0: not written, and then no parent in a tree. No two nodes share a slot. A row's read slot may be
        one of its own write slots if its layout is write_layout, and is no other row's.
    sglang: the version whose launch shape to follow, and so whose bits, where config is None.
    Returns o [B*N, HV, V], q's dtype. Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch = read_slots.shape[0]
    tokens, heads_k, dim_k = k.shape
    heads_v, dim_v = v.shape[1:]
    nodes = tokens // max(batch, 1)
    if tokens != batch * nodes or (batch and not nodes):
        raise ValueError(f"k: {tokens} tokens for {batch} rows, expected the same number of nodes each")
    if heads_v % heads_k:
        raise ValueError(f"v: {heads_v} heads, expected a multiple of k's {heads_k}")
    check_shape("q", q, (tokens, heads_k, dim_k))
    check_shape("v", v, (tokens, heads_v, dim_v))
    for name, tensor, width in (("q", q, 2), ("k", k, 2), ("v", v, 2), ("a", a, 1), ("b", b, 1)):
        check_dtype(name, tensor, FLOATS)
        check_inner_contiguous(name, tensor, width)
    check_shape("a", a, (tokens, heads_v))
    check_shape("b", b, (tokens, heads_v))
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_shape(name, tensor, (heads_v,))
        check_inner_contiguous(name, tensor)
    check_shape("states", states, (None, heads_v, dim_v, dim_k))
    check_dtype("states", states, FLOATS)
    check_inner_contiguous("states", states, 3)
    check_index("read_slots", read_slots, batch)
    for name, tensor in (("write_slots", write_slots), ("parents", parents)):
        if tensor is None:
            continue
        check_dtype(name, tensor, INDEX_DTYPES)
        check_inner_contiguous(name, tensor)
        if tensor.shape[0] < batch or tuple(tensor.shape[1:]) != (nodes,):
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected at least {batch} rows of {nodes}")
    check_layout(state_layout, states.shape[0], write_layout)
    check_same_device(
        q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias, states=states, read_slots=read_slots,
        write_slots=write_slots, parents=parents, state_layout=state_layout,
    )  # fmt: skip

    out = torch.empty(tokens, heads_v, dim_v, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    if config is None:
        hopper = q.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(q.device)[0] == 9
        config = default_config(
            batch=batch, dims=(dim_k, dim_v), layouts=state_layout is not None, hopper=hopper, sglang=sglang
        )
    constants = constants_for(
        config,
        heads=(heads_k, heads_v),
        dims=(dim_k, dim_v),
        tree=parents is not None,
        layouts=state_layout is not None,
    )
    _slots_kernel[(triton.cdiv(dim_v, config.block_v), heads_v, batch)](
        q, k, v, a, b, A_log, dt_bias, scale, states, state_layout, read_slots, write_slots, parents, out,
        nodes, write_layout,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0),
        write_slots.stride(0), 0 if parents is None else parents.stride(0),
        **constants, num_warps=1, enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
    return out
