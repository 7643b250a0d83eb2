"""Mamba2 (SSD) replay in plain PyTorch: the tests' oracle in float64 and the CPU engine's op in float32.

The recurrence, token by token (x [nheads, headdim], B and C [ngroups, dstate], dt and A [nheads]):

    S <- exp(A dt) S + (dt B) x^T      y = S C + D x

Same signatures as the Triton launchers in verify_replay.py, fold.py and verify_slots.py, plus `compute_dtype`.
Vectorised over rows and heads; the only Python loops run over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.axis_order import KV
from ..common.operands import PLAN_ROOT, Folds, NodeSlots, Rows, States, check_nodes
from ..common.reference import first_entries, lie_as_kv, load_states, store_states
from .arguments import SlotsTiling, per_head
from .window import Mamba2Window


def final_dt(dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dtype: torch.dtype) -> torch.Tensor:
    """The step size the recurrence uses: bias and softplus. dt [..., nheads]."""
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return dt


def _tokens(
    x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `_step` takes of tokens x [..., nheads, headdim], B [..., ngroups, dstate], dt [..., nheads]; A [nheads]."""
    B = B.repeat_interleave(x.shape[-2] // B.shape[-2], dim=-2)
    return x.unsqueeze(-1), (B * dt[..., None]).unsqueeze(-2), torch.exp(A * dt)[..., None, None]


def _step(state: torch.Tensor, x: torch.Tensor, dB: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """One token. state [..., nheads, headdim, dstate], x [..., nheads, headdim, 1], dt B [..., nheads, 1, dstate],
    e^(A dt) [..., nheads, 1, 1]."""
    return torch.addcmul(state * decay, x, dB)


def _replay(
    state: torch.Tensor,
    counts: torch.Tensor,
    positions: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
) -> torch.Tensor:
    """Fold the first counts[b] entries of each row, in order.

    state [B, nheads, headdim, dstate], counts [B], positions [B, C], windows x, B, dt [B, C, ...], A [nheads].
    """
    each = torch.arange(state.shape[0], device=state.device)
    inputs = (first_entries(held, each, positions, counts).to(state.dtype) for held in (x, B, dt))
    for token in zip(*_tokens(*inputs, A), strict=True):
        state = _step(state, *token)
    return state


def mamba2_verify_reference(
    dt: torch.Tensor,
    C: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    states: States,
    rows: Rows,
    window: Mamba2Window,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Outputs of all draft nodes. See verify_replay.mamba2_verify; rows.schedule is of no effect here.

    float64 outputs stay float64 unless `out` is given. Raises ValueError where an ancestor mask or the window is too
    small for the nodes.
    """
    assert rows.ancestors is not None
    nheads = window.x.shape[2]
    batch, nodes = rows.batch, rows.ancestors.shape[1]
    check_nodes(nodes)
    window.check_room(nodes)
    plan = rows.plan_for(nodes, window.fold_threshold).long()
    A = per_head("A", A, 1).to(compute_dtype)
    bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)
    slot, row, before, folding = plan[:, :4].unbind(1)
    real = slot > 0
    places, waiting = plan[:, PLAN_ROOT:].split((nodes, plan.shape[1] - PLAN_ROOT - nodes), dim=1)

    start = load_states(states, slot).to(compute_dtype)
    inputs = (window.x[row], window.B[row], window.dt[row], A)
    folded = _replay(start, folding, window.order[row].to(torch.int64), *inputs)
    folds = folding > 0
    store_states(states, slot[folds], folded[folds], lie_as_kv(states, slot[folds]))
    # what the next verify would read
    start = torch.where(folds[:, None, None, None], folded.to(states.data.dtype).to(compute_dtype), start)
    start = _replay(start, before - folding, waiting, *inputs)

    nodes_at = row[:, None], places
    x_nodes, B_nodes = (stored[nodes_at].to(compute_dtype) for stored in (window.x, window.B))
    C_nodes = C.reshape(batch, nodes, *C.shape[1:]).to(compute_dtype)
    dt_nodes = final_dt(per_head("dt", dt, 2), bias, dt_softplus, compute_dtype)
    dt_nodes = dt_nodes.reshape(batch, nodes, nheads)
    window.dt[row[real][:, None], nodes_at[1][real]] = dt_nodes[real].to(window.dt.dtype)

    bits = torch.arange(nodes, device=C.device)
    is_ancestor = ((rows.ancestors[:batch, :, None] >> bits) & 1).bool() & (bits < bits[:, None])
    parent = torch.where(is_ancestor, bits, -1).amax(2)  # the last ancestor
    each = torch.arange(batch, device=C.device)
    after = start.new_empty(nodes + 1, *start.shape)
    after[-1] = start  # what a parent of -1 finds
    tokens = [token.unbind(1) for token in _tokens(x_nodes, B_nodes, dt_nodes, A)]
    for node, (token, above) in enumerate(zip(zip(*tokens, strict=True), parent.unbind(1), strict=True)):
        after[node] = _step(after[above, each], *token)
    C_heads = C_nodes.repeat_interleave(nheads // C.shape[1], dim=2)
    y = (after[:-1].transpose(0, 1) @ C_heads.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        y = y + per_head("D", D, 1).to(compute_dtype)[:, None] * x_nodes
    y = torch.where(real[:, None, None, None], y, 0).flatten(0, 1)
    if out is None:
        return y if compute_dtype == torch.float64 else y.to(C.dtype)
    out.copy_(y)
    return out


def mamba2_fold_reference(
    states: States,
    window: Mamba2Window,
    folds: Folds,
    *,
    A: torch.Tensor,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """States after the first counts[b] window entries, all layers. See fold.mamba2_fold."""
    real = (folds.src > 0) & (folds.dst > 0) & ((folds.counts > 0) | (folds.src != folds.dst))
    source, target = folds.src[real].to(torch.int64), folds.dst[real].to(torch.int64)
    row = folds.rows[real].to(torch.int64)
    count = folds.counts[real].to(torch.int64)
    row = torch.where(count > 0, row, 0)  # a plain copy reads no window
    positions = window.order[row].to(torch.int64)
    is_kv = torch.where(source == target, lie_as_kv(states, source), states.write == KV)
    for index in range(states.data.shape[0]):
        layer, inputs = states.layer(index), window.layer(index)
        start = load_states(layer, source).to(compute_dtype)
        decay_rate = A[index].to(compute_dtype)
        state = _replay(start, count, positions, inputs.x[row], inputs.B[row], inputs.dt[row], decay_rate)
        store_states(layer, target, state, is_kv)


def mamba2_verify_slots_reference(
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
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Outputs of all draft nodes, a state for each. See verify_slots.mamba2_verify_slots; `tiling` has no effect here.

    Bit for bit what SGLang computes where there is no GPU (sglang_mamba_mtp/cpu/mamba2_ops.py): its order of
    operations, on its shapes (torch's exp does not round alike at all of them). There a tree's nodes continue from
    their parents' states before these are rounded. float64 outputs stay float64 unless `out` is given.
    """
    del tiling
    tokens, nheads, headdim = x.shape
    batch, count = nodes.read.shape[0], nodes.write.shape[1]
    write = nodes.write[:batch]
    A = per_head("A", A, 1)[:, None, None].expand(nheads, headdim, states.data.shape[3]).to(compute_dtype)
    bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)[:, None].expand(nheads, headdim)
    dt = per_head("dt", dt, 2)[..., None].expand(tokens, nheads, headdim).unflatten(0, (batch, count))
    steps = final_dt(dt, bias, dt_softplus, compute_dtype)
    real = nodes.read > 0
    start = load_states(states, torch.where(real, nodes.read, 0).to(torch.int64)).to(compute_dtype)
    start[~real] = 0
    x_nodes = x.reshape(batch, count, nheads, headdim).to(compute_dtype)
    B_nodes, C_nodes = (
        t.reshape(batch, count, *t.shape[1:]).to(compute_dtype).repeat_interleave(nheads // t.shape[1], dim=2)
        for t in (B, C)
    )
    above = torch.arange(batch, device=x.device)
    after = start.new_empty(batch, count, *start.shape[1:])
    y = torch.empty_like(x_nodes)
    state = start
    for node in range(count):
        if nodes.parents is not None and node > 0:
            state = after[above, nodes.parents[:batch, node].to(torch.int64)]
        step = steps[:, node, ..., None]
        state = state * torch.exp(step * A) + (step * x_nodes[:, node, ..., None]) * B_nodes[:, node, :, None]
        y[:, node] = (state @ C_nodes[:, node, :, :, None])[..., 0]
        after[:, node] = state
    if D is not None:
        y = y + per_head("D", D, 1).to(compute_dtype)[:, None] * x_nodes
    y[~real] = 0
    written = real[:, None] & (write > 0)
    into = write[written].to(torch.int64)
    store_states(states, into, after[written], lie_as_kv(states, into))
    y = y.reshape(tokens, nheads, headdim)
    if out is None:
        return y if compute_dtype == torch.float64 else y.to(x.dtype)
    out.copy_(y)
    return out
