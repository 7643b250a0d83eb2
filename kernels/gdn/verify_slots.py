"""GDN target verify in slots mode: the plain recurrence, every node's state written to that node's own slot.

    S_i = e^{g_i} S_parent(i);  S_i += beta_i (v_i - S_i k_i) k_i^T;  o_i = scale S_i q_i        (q, k normalised)
A row starts from the state in its read slot, wherever its last verify left it; there is no copy and no scatter. That
slot may be one of those written, in slots mode the root's: it is read into registers before anything is stored, and
children of the root that read their parent's slot want the root's state.

Outputs and states are bit for bit those of SGLang's fused_sigmoid_gating_recurrent.py in target verify, whose
arithmetic this kernel follows operation by operation: a column of state per lane group in one warp, float32 throughout;
along a chain the state stays in registers, in a tree a node continues from its parent's state as stored. Up to 0.5.21
SGLang divides q and k by their norms, later it multiplies by the norm's reciprocal; on a GPU both are that product.

Shapes: states [S, HV, V, K], or [S, HV, K, V] in slots whose bit says so (common/tile.py); each is written as it lies.
One program does one (row, value head, tile of values), all nodes: nobody else reads or writes its part of any slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.device import compute_capability
from ..common.grid import launch_grid
from ..common.operands import NodeSlots, States
from ..common.tile import IS_KV, load_state, store_state
from .arguments import check_groups, node_inputs
from .tiles import may_fuse


@triton.jit
def _normalised(x):
    return x * (1.0 / tl.sqrt(tl.sum(x * x) + 1e-6))


@triton.jit(do_not_specialize=["nodes"])
def _slots_kernel(
    q, k, v, a, b, A_log, dt_bias, scale, states, axis_order, read_slots, write_slots, parents, out,
    nodes, stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_write, stride_parents,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TREE: tl.constexpr, EITHER: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    hv = tl.program_id(0) // tiles % HV
    h = hv // (HV // H)
    batch_row = (tl.program_id(0) // (tiles * HV)).to(tl.int64)
    offs_k = tl.arange(0, BK)
    offs_v = tl.program_id(0) % tiles * BV + tl.arange(0, BV)
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
    if EITHER:
        is_kv = tl.load(axis_order + slot, mask=slot > 0, other=0) == IS_KV
    # added to zeros, and what a branch leaves: as in SGLang's kernel, lest the compiler contract other products of the
    # sums than there (test_slots_arithmetic.py)
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if slot > 0:
        p_slot = states + slot * stride_slot
        state += load_state(p_slot + in_vk, p_slot + in_kv, mask_state, is_kv, EITHER)

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
                above = tl.load(write_slots + parent).to(tl.int64)
                p_slot = states + above * stride_slot
                if EITHER:
                    is_kv = tl.load(axis_order + above, mask=above > 0, other=0) == IS_KV
                state = load_state(p_slot + in_vk, p_slot + in_kv, mask_state, is_kv, EITHER)
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
            if EITHER:
                is_kv = tl.load(axis_order + slot) == IS_KV
            store_state(p_slot + in_vk, p_slot + in_kv, written, mask_state, is_kv, EITHER)
        p_q += stride_q
        p_k += stride_k
        p_v += stride_v
        p_a += stride_a
        p_b += stride_b
        p_out += HV * V


@dataclass(frozen=True)
class SlotsConfig:
    """How gdn_verify_slots is cut up: block_v values per program, a power of two.

    Bits may depend on it: a compiler lays sums out by the tile.
    """

    block_v: int


def default_config(
    *, batch: int, dims: tuple[int, int], either: bool, hopper: bool, sglang: tuple[int, ...] = (0, 5, 23)
) -> SlotsConfig:
    """The configuration gdn_verify_slots uses: dims (K, V); either: slots may lie in either axis order;
    hopper: compute 9.x; sglang: the version whose bits are wanted.

    SGLang's rule, which 0.5.22 changed, so that the compiler meets the tiles whose sums it is to repeat: on an H100 a
    chain of narrow tiles sums otherwise than one of wide tiles. The columns of a wide tile that may be turned take more
    registers than there are.
    """
    key, value = dims
    if (key, value) != (128, 128):
        return SlotsConfig(min(triton.next_power_of_2(value), 32))
    if either:
        return SlotsConfig(8)
    return SlotsConfig(4 if hopper and batch <= 64 and sglang >= (0, 5, 22) else 32)


def constants_for(
    config: SlotsConfig, *, heads: tuple[int, int], dims: tuple[int, int], tree: bool, either: bool
) -> dict[str, int]:
    """Compile-time arguments of the kernel: heads (H, HV), dims (K, V)."""
    return {
        "H": heads[0], "HV": heads[1], "K": dims[0], "V": dims[1], "BK": triton.next_power_of_2(dims[0]),
        "BV": config.block_v, "TREE": tree, "EITHER": either,
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
    states: States,
    nodes: NodeSlots,
    config: SlotsConfig | None = None,
    sglang: tuple[int, ...] = (0, 5, 23),
) -> torch.Tensor:
    """Score the N draft nodes of each of B rows from its read slot; returns o [B*N, HV, V] in q's dtype.

    q, k    [B*N, H, K] float, heads contiguous, any token stride: read, after the convolution, before normalisation.
    v       [B*N, HV, V] float, heads contiguous, any token stride: read, after the convolution.
    a, b    [B*N, HV] float, inner contiguous, any token stride: read, raw gate inputs.
    A_log, dt_bias
            [HV] float: read.
    scale   multiplies normalised q.
    states  [S, HV, V, K], each slot contiguous: read at the read slots, written at the write slots, each as it lies.
    nodes   read.
    config  how to cut it up; None: as the SGLang version does whose bits are wanted.
    sglang  that version.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    write_slots, parents = nodes.write, nodes.parents
    sizes = check(
        read_slots=Arg(nodes.read, "B"),
        write_slots=Arg(write_slots, ">=B N"),
        parents=Arg(parents, ">=B N"),
        **node_inputs(q, a, b, A_log, dt_bias),
        k=Arg(k, "B*N H K", FLOATS, contiguous=2),
        v=Arg(v, "B*N HV V", FLOATS, contiguous=2),
        states=Arg(states.data, "S HV V K", FLOATS, contiguous=3),
        axis_order=Arg(states.axis_order, "S"),
    )
    batch, node_count, heads_k, heads_v, dim_k, dim_v = sizes.get_all("B N H HV K V")
    check_groups("v", heads_v, heads_k)

    out = torch.empty(batch * node_count, heads_v, dim_v, dtype=q.dtype, device=q.device)
    if batch == 0 or node_count == 0:
        return out
    either = states.axis_order is not None
    if config is None:
        hopper = compute_capability(q.device)[0] == 9
        config = default_config(batch=batch, dims=(dim_k, dim_v), either=either, hopper=hopper, sglang=sglang)
    constants = constants_for(
        config, heads=(heads_k, heads_v), dims=(dim_k, dim_v), tree=parents is not None, either=either
    )
    _slots_kernel[launch_grid(batch * heads_v * triton.cdiv(dim_v, config.block_v))](
        q, k, v, a, b, A_log, dt_bias, scale, states.data, states.axis_order, nodes.read, write_slots, parents, out,
        node_count,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.data.stride(0),
        write_slots.stride(0), 0 if parents is None else parents.stride(0),
        **constants, num_warps=1, enable_fp_fusion=may_fuse(dim_k),
    )  # fmt: skip
    return out
