"""Mamba2 (SSD) replay in plain PyTorch: the tests' oracle in float64 and the CPU engine's op in float32.

The recurrence, token by token (x [nheads, headdim], B and C [ngroups, dstate], dt and A [nheads]):

    S <- exp(A dt) S + (dt B) x^T      y = S C + D x      y <- y silu(z)

Same keyword signatures as the Triton launchers in verify.py, fold.py and slots.py, plus `compute_dtype`. Vectorised
over rows and heads; the only Python loops run over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.axis_order import KV, VK
from .arguments import SlotsTiling, per_head


def final_dt(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limits: tuple[float, float] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The step size the recurrence uses: bias, softplus, limits. dt [..., nheads]."""
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limits is not None:
        dt = dt.clamp(*dt_limits)
    return dt


def load_states(pool: torch.Tensor, slots: torch.Tensor, state_layout: torch.Tensor | None) -> torch.Tensor:
    """The states [B, nheads, headdim, dstate] of slots [B] of pool [S, nheads, headdim, dstate], however they lie."""
    states = pool[slots]
    if state_layout is None:
        return states
    turned = states.reshape(*states.shape[:2], states.shape[3], states.shape[2]).transpose(2, 3).contiguous()
    return torch.where((state_layout[slots] == KV)[:, None, None, None], turned, states)


def store_states(pool: torch.Tensor, slots: torch.Tensor, states: torch.Tensor, is_kv: torch.Tensor) -> None:
    """Write states [B, nheads, headdim, dstate] to slots [B]; is_kv [B]: as [dstate, headdim]."""
    turned = states.transpose(2, 3).reshape(states.shape)
    pool[slots] = torch.where(is_kv[:, None, None, None], turned, states).to(pool.dtype)


def _step(state: torch.Tensor, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """One token. state [..., nheads, headdim, dstate], x [..., nheads, headdim], B [..., ngroups, dstate], dt, A."""
    B = B.repeat_interleave(state.shape[-3] // B.shape[-2], dim=-2)
    return state * torch.exp(A * dt)[..., None, None] + (B * dt[..., None])[..., None, :] * x[..., :, None]


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
    batch = torch.arange(state.shape[0], device=state.device)
    for token in range(int(counts.max()) if counts.numel() else 0):
        at = (batch, positions[:, token])
        stepped = _step(state, x[at].to(state.dtype), B[at].to(state.dtype), dt[at].to(state.dtype), A)
        state = torch.where((token < counts)[:, None, None, None], stepped, state)
    return state


def mamba2_verify_reference(
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
    checkpoint: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    pending: torch.Tensor,
    order: torch.Tensor,
    window_x: torch.Tensor,
    window_B: torch.Tensor,
    window_dt: torch.Tensor,
    ancestors: torch.Tensor,
    fold_threshold: int,
    schedule: torch.Tensor | None = None,
    state_layout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Outputs of all draft nodes. See verify.mamba2_verify; `schedule` is of no effect here.

    float64 outputs stay float64 unless `out` is given.
    """
    del schedule
    tokens, nheads, headdim = x.shape
    batch = slots.shape[0]
    nodes, capacity = ancestors.shape[1], order.shape[1]
    A = per_head("A", A, 1).to(compute_dtype)
    bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)
    real = slots > 0
    slot = torch.where(real, slots, 0).to(torch.int64)
    row = torch.where(real, rows, 0).to(torch.int64)
    before = torch.where(real, pending[slot], 0).to(torch.int64)
    positions = order[row].to(torch.int64)
    windows = (window_x[row], window_B[row], window_dt[row])

    start = load_states(checkpoint, slot, state_layout).to(compute_dtype)
    folded = _replay(start, before, positions, *windows, A)
    folds = real & (before > fold_threshold)
    is_kv = torch.zeros_like(real) if state_layout is None else state_layout[slot] == KV
    store_states(checkpoint, slot[folds], folded[folds], is_kv[folds])
    # what the next verify would read
    start = torch.where(folds[:, None, None, None], folded.to(checkpoint.dtype).to(compute_dtype), folded)

    x_nodes, B_nodes, C_nodes = (t.reshape(batch, nodes, *t.shape[1:]).to(compute_dtype) for t in (x, B, C))
    dt_nodes = final_dt(per_head("dt", dt, 2), bias, dt_softplus, dt_limits, compute_dtype)
    dt_nodes = dt_nodes.reshape(batch, nodes, nheads)
    entry = (before[:, None] + torch.arange(nodes, device=x.device)).clamp(max=capacity - 1)
    stored_at = (row[real][:, None], positions.gather(1, entry)[real])
    for window, values in ((window_x, x_nodes), (window_B, B_nodes), (window_dt, dt_nodes)):
        window[stored_at] = values[real].to(window.dtype)

    masks = ancestors[:batch]
    states: list[torch.Tensor] = []
    outputs = []
    for node in range(nodes):
        state = start
        for above in range(node):  # the last ancestor that sticks is the parent
            is_ancestor = ((masks[:, node] >> above) & 1) == 1
            state = torch.where(is_ancestor[:, None, None, None], states[above], state)
        state = _step(state, x_nodes[:, node], B_nodes[:, node], dt_nodes[:, node], A)
        states.append(state)
        C_heads = C_nodes[:, node].repeat_interleave(nheads // C.shape[1], dim=1)
        outputs.append((state * C_heads[:, :, None, :]).sum(-1))
    y = torch.stack(outputs, 1).reshape(tokens, nheads, headdim)
    if D is not None:
        y = y + per_head("D", D, 1).to(compute_dtype)[:, None] * x.to(compute_dtype)
    if z is not None:
        y = y * torch.nn.functional.silu(z.to(compute_dtype))
    y = torch.where(real.repeat_interleave(nodes)[:, None, None], y, 0)
    if out is None:
        return y if compute_dtype == torch.float64 else y.to(x.dtype)
    out.copy_(y)
    return out


def mamba2_fold_reference(
    checkpoint: torch.Tensor,
    *,
    window_x: torch.Tensor,
    window_B: torch.Tensor,
    window_dt: torch.Tensor,
    A: torch.Tensor,
    order: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    state_layout: torch.Tensor | None = None,
    write_layout: int = VK,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Checkpoints after the first counts[b] window entries, all layers. See fold.mamba2_fold."""
    real = (src_slots > 0) & (dst_slots > 0) & ((counts > 0) | (src_slots != dst_slots))
    source, target = src_slots[real].to(torch.int64), dst_slots[real].to(torch.int64)
    row = rows[real].to(torch.int64)
    count = counts[real].to(torch.int64)
    row = torch.where(count > 0, row, 0)  # a plain copy reads no window
    positions = order[row].to(torch.int64)
    keeps = torch.zeros_like(source) if state_layout is None else state_layout[source]
    is_kv = torch.where(source == target, keeps, write_layout) == KV
    for layer in range(checkpoint.shape[0]):
        windows = (window_x[layer][row], window_B[layer][row], window_dt[layer][row])
        start = load_states(checkpoint[layer], source, state_layout).to(compute_dtype)
        state = _replay(start, count, positions, *windows, A[layer].to(compute_dtype))
        store_states(checkpoint[layer], target, state, is_kv)


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
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Outputs of all draft nodes, a state for each. See slots.mamba2_verify_slots; `tiling` is of no effect here.

    Bit for bit what SGLang computes where there is no GPU (sglang_mamba_mtp/cpu/mamba2_ops.py): its order of
    operations, on its shapes (torch's exp does not round alike at all of them). There a tree's nodes continue from
    their parents' states before these are rounded. float64 outputs stay float64 unless `out` is given.
    """
    del tiling
    tokens, nheads, headdim = x.shape
    batch, nodes = write_slots.shape
    A = per_head("A", A, 1)[:, None, None].expand(nheads, headdim, states.shape[3]).to(compute_dtype)
    bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)[:, None].expand(nheads, headdim)
    dt = per_head("dt", dt, 2)[..., None].expand(tokens, nheads, headdim).unflatten(0, (batch, nodes))
    steps = final_dt(dt, bias, dt_softplus, dt_limits, compute_dtype)
    real = read_slots > 0
    start = load_states(states, torch.where(real, read_slots, 0).to(torch.int64), state_layout).to(compute_dtype)
    start[~real] = 0
    x_nodes = x.reshape(batch, nodes, nheads, headdim).to(compute_dtype)
    B_nodes, C_nodes = (
        t.reshape(batch, nodes, *t.shape[1:]).to(compute_dtype).repeat_interleave(nheads // t.shape[1], dim=2)
        for t in (B, C)
    )
    above = torch.arange(batch, device=x.device)
    after = start.new_empty(batch, nodes, *start.shape[1:])
    y = torch.empty_like(x_nodes)
    state = start
    for node in range(nodes):
        if parents is not None and node > 0:
            state = after[above, parents[:batch, node].to(torch.int64)]
        step = steps[:, node, ..., None]
        state = state * torch.exp(step * A) + (step * x_nodes[:, node, ..., None]) * B_nodes[:, node, :, None]
        y[:, node] = (state @ C_nodes[:, node, :, :, None])[..., 0]
        after[:, node] = state
    if D is not None:
        y = y + per_head("D", D, 1).to(compute_dtype)[:, None] * x_nodes
    if z is not None:
        y = y * F.silu(z.reshape(x_nodes.shape).to(compute_dtype))
    y[~real] = 0
    written = real[:, None] & (write_slots > 0)
    store_states(
        states,
        write_slots[written].to(torch.int64),
        after[written],
        torch.full((int(written.sum()),), write_layout == KV, device=x.device),
    )
    y = y.reshape(tokens, nheads, headdim)
    if out is None:
        return y if compute_dtype == torch.float64 else y.to(x.dtype)
    out.copy_(y)
    return out
