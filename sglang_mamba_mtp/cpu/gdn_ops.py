"""Gated delta net (GDN) on CPU: gates, gated RMSNorm, chunked prefill, decode and verify.

Recurrence (arXiv:2412.06464), per value head, S: `[V, K]`, keys l2-normalised:

    S <- exp(g_t) S;  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  o_t = scale S q_t

The state lives in the pool as `[slots, HV, V, K]`, float32 or bfloat16; all arithmetic here is float32. Head `h` of the
HV value heads reads query/key head `h // (HV // H)`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

CHUNK = 64
L2_EPS = 1e-6


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay and write strength.

    Args
        A_log, dt_bias: `[HV]`; a, b: `[T, HV]`.

    Returns
        `g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, both `[1, T, HV]` float32.
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def fused_rmsnorm_gated_cpu(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """`rmsnorm(x) * weight * silu(gate)` over the last dimension; x, gate and out `[..., D]`, weight `[D]`."""
    xf = x.float()
    normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * F.silu(gate.float())).to(x.dtype)


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _prepare_qk(q: torch.Tensor, k: torch.Tensor, num_v_heads: int, l2norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float32, normalised, query scaled by K**-0.5, heads repeated to `num_v_heads` (dim -2)."""
    q, k = q.float(), k.float()
    if l2norm:
        q, k = _l2norm(q), _l2norm(k)
    q = q * q.shape[-1] ** -0.5
    group = num_v_heads // q.shape[-2]
    return q.repeat_interleave(group, dim=-2), k.repeat_interleave(group, dim=-2)


def _load_states(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[len(slots), HV, V, K]` float32 copies; padding slots (< 0) read as zeros."""
    states = pool[slots.clamp(min=0)].float()
    dead = slots < 0
    if bool(dead.any()):
        states[dead] = 0
    return states


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    initial_state_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill packed sequences in chunks of 64 and leave each final state in its slot.

    Within a chunk the delta rule is the unit lower triangular system of architecture.md, solved for all chunks of the
    batch at once; only the state runs from chunk to chunk, all sequences abreast.

    Args
        q, k: `[1, T, H, K]`; v: `[1, T, HV, V]`; g, beta: `[1, T, HV]`.
        initial_state: the pool, `[slots, HV, V, K]`, read and written in place.
        cu_seqlens: `[num_seqs + 1]`; initial_state_indices: `[num_seqs]` slots, negative = padding.

    Returns
        `(o, None, h)`: o `[1, T, HV, V]` in q's dtype; h `[1, chunks, HV, V, K]` float32, the state each chunk starts
        from, sequences one after the other, `ceil(len / 64)` chunks each (radix snapshots read it).
    """
    if head_first:
        raise NotImplementedError("chunk_gated_delta_rule_cpu: head_first=True is not supported; pass [1, T, H, D]")
    bounds = cu_seqlens.tolist()
    lens = [e - s for s, e in itertools.pairwise(bounds)]
    slots = torch.arange(len(lens)) if initial_state_indices is None else initial_state_indices.long()[: len(lens)]
    num_v_heads, dim_v = v.shape[-2:]
    dim_k = k.shape[-1]
    total = bounds[-1]
    q32, k32 = _prepare_qk(q[0, :total], k[0, :total], num_v_heads, use_qk_l2norm_in_kernel)

    chunks = [-(-n // CHUNK) for n in lens]
    first_chunk = [0]
    for c in chunks:
        first_chunk.append(first_chunk[-1] + c)
    num_chunks = first_chunk[-1]
    # Row of token t in the padded [num_chunks * 64] layout.
    place = torch.cat(
        [torch.arange(n) + first_chunk[i] * CHUNK for i, n in enumerate(lens)] or [torch.empty(0, dtype=torch.int64)]
    )

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """`[T, HV, ...]` -> `[num_chunks, HV, 64, ...]`, zero padded: zero k, v, beta and g leave the state alone."""
        padded = x.new_zeros(num_chunks * CHUNK, *x.shape[1:])
        padded[place] = x
        return padded.view(num_chunks, CHUNK, *x.shape[1:]).transpose(1, 2)

    qc, kc, vc = chunked(q32), chunked(k32), chunked(v[0, :total].float())
    gc, bc = chunked(g[0, :total].float()), chunked(beta[0, :total].float())
    cum = gc.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    lower = (kc @ kc.transpose(-1, -2)) * decay * bc.unsqueeze(-1)
    # (I + strict_lower) u = beta v - beta e^G (S0 k); both right sides at once. unitriangular ignores the diagonal.
    rhs = torch.cat([vc * bc.unsqueeze(-1), kc * (bc * cum.exp()).unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    u_free, u_state = solved[..., :dim_v], solved[..., dim_v:]
    scores = (qc @ kc.transpose(-1, -2)) * decay
    q_in = qc * cum.exp().unsqueeze(-1)
    k_out = kc * (cum[..., -1:] - cum).exp().unsqueeze(-1)
    chunk_decay = cum[..., -1].exp()

    states = _load_states(initial_state, slots)
    h = torch.empty(num_chunks, num_v_heads, dim_v, dim_k)
    out = torch.empty(num_chunks, num_v_heads, CHUNK, dim_v)
    for c in range(max(chunks, default=0)):
        rows = torch.tensor([i for i, n in enumerate(chunks) if n > c])
        at = torch.tensor([first_chunk[i] + c for i in rows.tolist()])
        state = states[rows]
        h[at] = state
        state_t = state.transpose(-1, -2)
        u = u_free[at] - u_state[at] @ state_t
        out[at] = q_in[at] @ state_t + scores[at] @ u
        states[rows] = state * chunk_decay[at][..., None, None] + u.transpose(-1, -2) @ k_out[at]

    alive = slots >= 0
    initial_state[slots[alive]] = states[alive].to(initial_state.dtype)
    o = q.new_zeros(1, q.shape[1], num_v_heads, dim_v)
    o[0, :total] = out.transpose(1, 2).reshape(num_chunks * CHUNK, num_v_heads, dim_v)[place].to(q.dtype)
    return o, None, h.unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """The recurrence token by token: one decode token per request, or the N draft nodes of a verify step.

    Args
        q, k: `[1, bs * N, H, K]`; v: `[1, bs * N, HV, V]`; a, b: `[bs * N, HV]`; A_log, dt_bias: `[HV]`.
        initial_state_source: pool `[slots, HV, V, K]`; written unless `disable_state_update`.
        initial_state_indices: `[bs]` slots, negative = padding (output 0, nothing written).
        cu_seqlens: `[bs + 1]`, equal lengths N.
        intermediate_states_buffer: `[rows, >= N, HV, V, K]`, receives the state after each node.
        intermediate_state_indices: `[bs]` rows of the buffer; defaults to 0..bs-1.
        retrieve_parent_token: `[bs, N]` parents, -1 for the root; None means a chain.

    Returns
        `[1, bs * N, HV, V]` in q's dtype.
    """
    if is_kda:
        raise NotImplementedError(
            "fused_sigmoid_gating_delta_rule_update_cpu: KDA (per-channel gates) has no CPU version"
        )
    bs = cu_seqlens.shape[0] - 1
    tokens = q.shape[1]
    n = tokens // max(bs, 1)
    if n * bs != tokens:
        raise ValueError(f"expected the same number of tokens per request, got {tokens} tokens for {bs} requests")
    num_v_heads, dim_v = v.shape[-2:]
    q32, k32 = _prepare_qk(q[0], k[0], num_v_heads, use_qk_l2norm_in_kernel)
    q32, k32 = (x.reshape(bs, n, *x.shape[1:]) for x in (q32, k32))
    v32 = v[0].float().reshape(bs, n, num_v_heads, dim_v)
    shifted = a.float().reshape(bs, n, num_v_heads) + dt_bias.float()
    decay = (-A_log.float().exp() * F.softplus(shifted, softplus_beta, softplus_threshold)).exp()
    beta = b.float().reshape(bs, n, num_v_heads).sigmoid()

    slots = initial_state_indices.long()[:bs]
    alive = slots >= 0
    root = _load_states(initial_state_source, slots)
    rows = torch.arange(bs)
    keep_all = retrieve_parent_token is not None or intermediate_states_buffer is not None
    # The node states stay float32 here whatever the pool's dtype, as they do in a kernel's registers.
    nodes = root.new_empty(bs, n, *root.shape[1:]) if keep_all else None
    parents = None if retrieve_parent_token is None else retrieve_parent_token[:bs].long()
    out = torch.empty(bs, n, num_v_heads, dim_v)
    state = root
    for i in range(n):
        if parents is not None and nodes is not None and i > 0:
            parent = parents[:, i]
            state = torch.where((parent < 0).view(bs, 1, 1, 1), root, nodes[rows, parent.clamp(min=0)])
        state = state * decay[:, i, :, None, None]
        key = k32[:, i].unsqueeze(-1)
        u = (v32[:, i].unsqueeze(-1) - state @ key) * beta[:, i, :, None, None]
        state = state + u @ key.transpose(-1, -2)
        out[:, i] = (state @ q32[:, i].unsqueeze(-1)).squeeze(-1)
        if nodes is not None:
            nodes[:, i] = state
    if intermediate_states_buffer is not None and nodes is not None:
        if cache_steps is not None and cache_steps < n:
            raise ValueError(f"the snapshot buffer holds cache_steps={cache_steps} nodes, the step has {n}")
        into = rows if intermediate_state_indices is None else intermediate_state_indices[:bs].long()
        intermediate_states_buffer[into[alive], :n] = nodes[alive].to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        initial_state_source[slots[alive]] = state[alive].to(initial_state_source.dtype)
    if not bool(alive.all()):
        out[~alive] = 0
    return out.view(1, tokens, num_v_heads, dim_v).to(q.dtype)
