"""GDN verify and fold in plain PyTorch: the float64 oracle of the tests and the op of the CPU engine.

The recurrence, token by token along each node's own path (k and q l2-normalised):
    S_i = e^{g_i} S_parent(i) (I - beta_i k_i k_i^T) + beta_i v_i k_i^T,    o_i = scale * S_i q_i
with S [V, K] a head's state. Source: Gated Delta Networks (arXiv 2412.06464) and SGLang's
fused_sigmoid_gating_recurrent.py, whose gates and eps these are. Same keyword signatures as the Triton launchers in
verify.py, fold.py and slots.py, plus `compute_dtype`. Vectorised over rows and heads; the Python loops run over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.axis_order import KV, VK

L2NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def _step(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """One token of many rows: state [B, HV, V, K], normalised k [B, HV, K], v [B, HV, V], g and beta [B, HV]."""
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
    return state + delta[..., :, None] * k[..., None, :]


def _load(pool: torch.Tensor, slots: torch.Tensor, state_layout: torch.Tensor | None) -> torch.Tensor:
    """A copy of pool[slots] [B, HV, V, K], each slot read as its bit says; slots int64 in range."""
    stored = pool[slots]
    if state_layout is None:
        return stored
    turned = stored.flatten(2).unflatten(2, (pool.shape[3], pool.shape[2])).transpose(2, 3)
    return torch.where((state_layout[slots] == KV)[:, None, None, None], turned, stored)


def _store(pool: torch.Tensor, slots: torch.Tensor, state: torch.Tensor, is_kv: torch.Tensor) -> None:
    """pool[slots] = state [B, HV, V, K], laid out as is_kv [B] bool says."""
    state = state.to(pool.dtype)
    turned = state.transpose(2, 3).reshape(state.shape)
    pool[slots] = torch.where(is_kv[:, None, None, None], turned, state)


def _fold_rows(
    state: torch.Tensor,
    *,
    positions: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    window_g: torch.Tensor,
    window_beta: torch.Tensor,
) -> torch.Tensor:
    """Apply the first counts[b] entries of positions [B, C] of each row's window to state [B, HV, V, K]."""
    dtype, group = state.dtype, window_v.shape[2] // window_k.shape[2]
    for t in range(int(counts.max()) if counts.numel() else 0):
        at = positions[:, t]
        k = _normalised(window_k[rows, at].to(dtype)).repeat_interleave(group, 1)
        new = _step(
            state,
            k,
            window_v[rows, at].to(dtype),
            window_g[rows, at].to(dtype),
            window_beta[rows, at].to(dtype),
        )
        # where, not a multiply by zero: entries past the count are garbage and may be NaN
        state = torch.where((t < counts)[:, None, None, None], new, state)
    return state


def gdn_verify_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    checkpoint: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    pending: torch.Tensor,
    order: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    window_g: torch.Tensor,
    window_beta: torch.Tensor,
    ancestors: torch.Tensor,
    fold_threshold: int,
    state_layout: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score the draft nodes of a batch. Arguments, mutations and result: verify.gdn_verify.

    compute_dtype is what all arithmetic runs in; inputs and pools may have any floating dtype.
    """
    batch = slots.shape[0]
    tokens, heads = k.shape[0], v.shape[1]
    nodes, group = tokens // batch, heads // k.shape[1]
    out = q.new_zeros(tokens, heads, v.shape[2])
    live = (slots > 0).nonzero()[:, 0]
    if live.numel() == 0:
        return out
    slot, row = slots[live].long(), rows[live].long()
    before = pending[slot].long()
    positions = order[row].long()

    def per_node(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, nodes, *x.shape[1:])[live]

    g = -A_log.to(compute_dtype).exp() * F.softplus(
        per_node(a).to(compute_dtype) + dt_bias.to(compute_dtype), threshold=SOFTPLUS_THRESHOLD
    )
    beta = per_node(b).to(compute_dtype).sigmoid()

    window = {"window_k": window_k, "window_v": window_v, "window_g": window_g, "window_beta": window_beta}
    state = _load(checkpoint, slot, state_layout).to(compute_dtype)
    folds = before > fold_threshold
    if bool(folds.any()):
        folded = _fold_rows(state[folds], positions=positions[folds], counts=before[folds], rows=row[folds], **window)
        folding = slot[folds]
        is_kv = torch.zeros_like(folding, dtype=torch.bool) if state_layout is None else state_layout[folding] == KV
        _store(checkpoint, folding, folded, is_kv)
        # outputs start from what was written, as the next verify's will
        state[folds] = folded.to(checkpoint.dtype).to(compute_dtype)
    kept = torch.where(folds, 0, before)
    state = _fold_rows(state, positions=positions, counts=kept, rows=row, **window)

    node_positions = positions.gather(1, before[:, None] + torch.arange(nodes, device=before.device))
    window_k[row[:, None], node_positions] = per_node(k).to(window_k.dtype)
    window_v[row[:, None], node_positions] = per_node(v).to(window_v.dtype)
    window_g[row[:, None], node_positions] = g.to(window_g.dtype)
    window_beta[row[:, None], node_positions] = beta.to(window_beta.dtype)

    kn = _normalised(per_node(k).to(compute_dtype)).repeat_interleave(group, 2)
    qn = _normalised(per_node(q).to(compute_dtype)).repeat_interleave(group, 2) * scale
    vn = per_node(v).to(compute_dtype)
    bits = torch.arange(nodes, device=q.device)
    is_ancestor = (ancestors[live][:, :, None] >> bits) & 1
    # nodes are in topological order, so the last strict ancestor is the parent
    parent = torch.where(is_ancestor.bool(), bits, -1).amax(2)
    states: list[torch.Tensor] = []
    outputs = []
    for i in range(nodes):
        above = state
        for j in range(i):
            above = torch.where((parent[:, i] == j)[:, None, None, None], states[j], above)
        states.append(_step(above, kn[:, i], vn[:, i], g[:, i], beta[:, i]))
        outputs.append(torch.einsum("bhvk,bhk->bhv", states[i], qn[:, i]))
    out.view(batch, nodes, heads, -1)[live] = torch.stack(outputs, 1).to(out.dtype)
    return out


def gdn_fold_reference(
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
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Fold windows into checkpoints of all layers. Arguments and mutations: fold.gdn_fold."""
    moves = (src_slots > 0) & (dst_slots > 0) & ((counts > 0) | (src_slots != dst_slots))
    live = moves.nonzero()[:, 0]
    if live.numel() == 0:
        return
    src, dst, count = src_slots[live].long(), dst_slots[live].long(), counts[live].long()
    # a row without tokens is a plain copy and its window row may be garbage
    row = torch.where(count > 0, rows[live].long(), 0)
    positions = order[row].long()
    to_kv = torch.full_like(src, write_layout == KV, dtype=torch.bool)
    if state_layout is not None:
        to_kv = torch.where(src == dst, state_layout[src] == KV, to_kv)
    for layer in range(checkpoint.shape[0]):
        folded = _fold_rows(
            _load(checkpoint[layer], src, state_layout).to(compute_dtype),
            positions=positions,
            counts=count,
            rows=row,
            window_k=window_k[layer],
            window_v=window_v[layer],
            window_g=window_g[layer],
            window_beta=window_beta[layer],
        )
        _store(checkpoint[layer], dst, folded, to_kv)


def gdn_verify_slots_reference(
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
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score the draft nodes of a batch, a state a node. Arguments, mutations and result: slots.gdn_verify_slots.

    Expression by expression the CPU engine's own verify (sglang_mamba_mtp.cpu.gdn_ops), hence its bits. Like it, and
    unlike the kernels, a tree goes on from a parent's state before that is rounded to the pool's dtype.
    """
    batch = read_slots.shape[0]
    tokens, heads, dim_v = v.shape
    nodes, group = tokens // max(batch, 1), heads // k.shape[1]

    def per_node(x: torch.Tensor) -> torch.Tensor:
        return x.to(compute_dtype).reshape(batch, nodes, *x.shape[1:])

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2NORM_EPS)

    qn = (normalised(per_node(q)) * scale).repeat_interleave(group, 2)
    kn = normalised(per_node(k)).repeat_interleave(group, 2)
    vn = per_node(v)
    softplus = F.softplus(per_node(a) + dt_bias.to(compute_dtype), threshold=SOFTPLUS_THRESHOLD)
    decay = (-A_log.to(compute_dtype).exp() * softplus).exp()
    beta = per_node(b).sigmoid()

    live = read_slots > 0
    root = _load(states, torch.where(live, read_slots, 0).long(), state_layout).to(compute_dtype)
    # whatever lies in slot 0 is nobody's
    root = torch.where(live[:, None, None, None], root, 0)
    rows = torch.arange(batch, device=q.device)
    after = root.new_empty(batch, nodes, *root.shape[1:])
    out = root.new_empty(batch, nodes, heads, dim_v)
    state = root
    for i in range(nodes):
        if parents is not None and i > 0:
            state = after[rows, parents[:batch, i].long()]
        state = state * decay[:, i, :, None, None]
        key = kn[:, i].unsqueeze(-1)
        delta = (vn[:, i].unsqueeze(-1) - state @ key) * beta[:, i, :, None, None]
        state = state + delta @ key.transpose(-1, -2)
        out[:, i] = (state @ qn[:, i].unsqueeze(-1)).squeeze(-1)
        after[:, i] = state
    out[~live] = 0
    into = torch.where(live[:, None], write_slots[:batch], 0).long()
    written = into > 0
    is_kv = torch.full((int(written.sum()),), write_layout == KV, device=q.device)
    _store(states, into[written], after[written], is_kv)
    return out.view(tokens, heads, dim_v).to(q.dtype)
