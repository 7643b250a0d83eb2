"""GDN verify and fold in plain PyTorch: the float64 oracle of the tests and the op of the CPU engine.

The recurrence, token by token along each node's own path (k and q l2-normalised):
    S_i = e^{g_i} S_parent(i) (I - beta_i k_i k_i^T) + beta_i v_i k_i^T,    o_i = scale * S_i q_i
with S [V, K] a head's state. Source: Gated Delta Networks (arXiv 2412.06464) and SGLang's
fused_sigmoid_gating_recurrent.py, whose gates and eps these are. Same signatures as the Triton launchers in
verify_replay.py, fold.py and verify_slots.py, plus `compute_dtype`. Vectorised over rows and heads; the Python loops
run over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.axis_order import KV
from ..common.operands import Folds, NodeSlots, Rows, States, check_nodes
from ..common.reference import entries_from, first_entries, lie_as_kv, load_states, store_states
from .window import GdnWindow

L2NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def token_factors(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """e^g, 1 / |k| and beta / |k| [..., HV, 3] of tokens: k [..., H, K], g and beta [..., HV]."""
    norm = torch.rsqrt((k * k).sum(-1) + L2NORM_EPS).repeat_interleave(g.shape[-1] // k.shape[-2], -1)
    return torch.stack([g.exp(), norm, beta * norm], -1)


def _step(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token of many rows: state [B, HV, V, K], normalised k [B, HV, 1, K], v [B, HV, V, 1], e^g and beta
    [B, HV, 1, 1]."""
    state = state * decay
    return torch.addcmul(state, beta * (v - state @ k.mT), k)


def _tokens(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `_step` takes of tokens: k [..., H, K], v [..., HV, V], g and beta [..., HV]."""
    keys = _normalised(k).repeat_interleave(v.shape[-2] // k.shape[-2], -2)
    return keys.unsqueeze(-2), v.unsqueeze(-1), g.exp()[..., None, None], beta[..., None, None]


def _fold_rows(
    state: torch.Tensor, window: GdnWindow, *, positions: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Apply the first counts[b] entries of positions [B, C] of each row's window to state [B, HV, V, K]."""
    inputs = (
        first_entries(held, rows, positions, counts).to(state.dtype)
        for held in (window.k, window.v, window.g, window.beta)
    )
    for token in zip(*_tokens(*inputs), strict=True):
        state = _step(state, *token)
    return state


def gdn_verify_reference(
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
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score the draft nodes of a batch. Arguments, mutations and result: verify_replay.gdn_verify.

    compute_dtype is what all arithmetic runs in; inputs and pools may have any floating dtype.
    """
    assert rows.ancestors is not None
    batch, nodes = rows.batch, rows.ancestors.shape[1]
    check_nodes(nodes)
    heads, dim_v = window.v.shape[2:]
    group = heads // window.k.shape[2]
    out = q.new_zeros(q.shape[0], heads, dim_v)
    live = (rows.slots > 0).nonzero()[:, 0]
    if live.numel() == 0:
        return out
    slot, row = rows.slots[live].long(), rows.rows[live].long()
    before = window.pending[slot].long()
    positions = window.order[row].long()

    def per_node(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, nodes, *x.shape[1:])[live]

    g = -A_log.to(compute_dtype).exp() * F.softplus(
        per_node(a).to(compute_dtype) + dt_bias.to(compute_dtype), threshold=SOFTPLUS_THRESHOLD
    )
    beta = per_node(b).to(compute_dtype).sigmoid()

    state = load_states(states, slot).to(compute_dtype)
    folding = window.folding(slot).long()
    folds = folding > 0
    if bool(folds.any()):
        folded = _fold_rows(state[folds], window, positions=positions[folds], counts=folding[folds], rows=row[folds])
        store_states(states, slot[folds], folded, lie_as_kv(states, slot[folds]))
        # outputs start from what was written, as the next verify's will
        state[folds] = folded.to(states.data.dtype).to(compute_dtype)
    rest = entries_from(positions, folding)
    state = _fold_rows(state, window, positions=rest, counts=before - folding, rows=row)

    node_positions = positions.gather(1, before[:, None] + torch.arange(nodes, device=before.device))
    nodes_at = row[:, None], node_positions
    k, v = (held[nodes_at].to(compute_dtype) for held in (window.k, window.v))
    for held, given in ((window.g, g), (window.beta, beta), (window.factors, token_factors(k, g, beta))):
        held[nodes_at] = given.to(held.dtype)

    tokens = [x.unbind(1) for x in _tokens(k, v, g, beta)]
    bits = torch.arange(nodes, device=q.device)
    is_ancestor = (rows.ancestors[live][:, :, None] >> bits) & 1
    # nodes are in topological order, so the last strict ancestor is the parent; where they are not, the root is
    parent = torch.where(is_ancestor.bool(), bits, -1).amax(2)
    parent = torch.where(parent < bits, parent, -1)
    each = torch.arange(live.numel(), device=q.device)
    after = state.new_empty(nodes + 1, *state.shape)
    after[-1] = state  # what a parent of -1 finds
    for i, (token, above) in enumerate(zip(zip(*tokens, strict=True), parent.unbind(1), strict=True)):
        after[i] = _step(after[above, each], *token)
    qn = _normalised(per_node(q).to(compute_dtype)).repeat_interleave(group, 2) * scale
    outputs = after[:-1].transpose(0, 1) @ qn.unsqueeze(-1)
    out.view(batch, nodes, heads, -1)[live] = outputs.squeeze(-1).to(out.dtype)
    return out


def gdn_fold_reference(
    states: States, window: GdnWindow, folds: Folds, *, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Fold windows into states of all layers. Arguments and mutations: fold.gdn_fold."""
    moves = (folds.src > 0) & (folds.dst > 0) & ((folds.counts > 0) | (folds.src != folds.dst))
    live = moves.nonzero()[:, 0]
    if live.numel() == 0:
        return
    src, dst, count = folds.src[live].long(), folds.dst[live].long(), folds.counts[live].long()
    # a row without tokens is a plain copy and its window row may be garbage
    row = torch.where(count > 0, folds.rows[live].long(), 0)
    positions = window.order[row].long()
    to_kv = torch.where(src == dst, lie_as_kv(states, src), states.write == KV)
    for index in range(states.data.shape[0]):
        layer = states.layer(index)
        state = load_states(layer, src).to(compute_dtype)
        folded = _fold_rows(state, window.layer(index), positions=positions, counts=count, rows=row)
        store_states(layer, dst, folded, to_kv)


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
    states: States,
    nodes: NodeSlots,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score the draft nodes of a batch, each to its slot. Arguments, mutations, result: verify_slots.gdn_verify_slots.

    Expression by expression the CPU engine's own verify (sglang_mamba_mtp.cpu.gdn_ops), hence its bits. Like it, and
    unlike the kernels, a tree goes on from a parent's state before that is rounded to the pool's dtype.
    """
    batch, count = nodes.read.shape[0], nodes.write.shape[1]
    tokens, heads, dim_v = v.shape
    group = heads // k.shape[1]

    def per_node(x: torch.Tensor) -> torch.Tensor:
        return x.to(compute_dtype).reshape(batch, count, *x.shape[1:])

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2NORM_EPS)

    qn = (normalised(per_node(q)) * scale).repeat_interleave(group, 2)
    kn = normalised(per_node(k)).repeat_interleave(group, 2)
    vn = per_node(v)
    softplus = F.softplus(per_node(a) + dt_bias.to(compute_dtype), threshold=SOFTPLUS_THRESHOLD)
    decay = (-A_log.to(compute_dtype).exp() * softplus).exp()
    beta = per_node(b).sigmoid()

    live = nodes.read > 0
    root = load_states(states, torch.where(live, nodes.read, 0).long()).to(compute_dtype)
    # whatever lies in slot 0 is nobody's
    root = torch.where(live[:, None, None, None], root, 0)
    rows = torch.arange(batch, device=q.device)
    after = root.new_empty(batch, count, *root.shape[1:])
    out = root.new_empty(batch, count, heads, dim_v)
    state = root
    for i in range(count):
        if nodes.parents is not None and i > 0:
            state = after[rows, nodes.parents[:batch, i].long()]
        state = state * decay[:, i, :, None, None]
        key = kn[:, i].unsqueeze(-1)
        delta = (vn[:, i].unsqueeze(-1) - state @ key) * beta[:, i, :, None, None]
        state = state + delta @ key.transpose(-1, -2)
        out[:, i] = (state @ qn[:, i].unsqueeze(-1)).squeeze(-1)
        after[:, i] = state
    out[~live] = 0
    into = torch.where(live[:, None], nodes.write[:batch], 0).long()
    written = into > 0
    store_states(states, into[written], after[written], lie_as_kv(states, into[written]))
    return out.view(tokens, heads, dim_v).to(q.dtype)
