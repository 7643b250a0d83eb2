"""Mamba2 on CPU: chunked prefill, decode and verify.

Recurrence (arXiv:2405.21060), per head, S: `[P, N]` (P = headdim, N = dstate), A < 0:

    dt_t = softplus(dt_t + dt_bias);  S <- exp(dt_t A) S + dt_t x_t B_t^T;  y_t = S C_t + D x_t

The state lives in the pool as `[slots, nheads, headdim, dstate]`; all arithmetic here is float32. Head `h` reads group
`h // (nheads // ngroups)` of B and C.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F


def _segments(starts: list[int], chunk_size: int, on_grid: bool) -> list[tuple[int, int, int]]:
    """`(sequence, begin, end)` pieces of at most `chunk_size` tokens.

    `on_grid` cuts at multiples of `chunk_size` of the packed batch as well as between sequences (the layout of
    0.5.23's intermediate states), otherwise at multiples of `chunk_size` from each sequence's own start (0.5.17's).
    """
    out = []
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        at = start
        while at < end:
            origin = 0 if on_grid else start
            stop = min(end, origin + ((at - origin) // chunk_size + 1) * chunk_size)
            out.append((i, at, stop))
            at = stop
    return out


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: torch.Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    return_track_states: bool = False,
    track_seq_idx: torch.Tensor | None = None,
    track_end_locs: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Prefill of packed sequences, as `MambaMixer2.forward` calls it.

    Args
        x: `[1, T, nheads, headdim]`; dt: `[1, T, nheads]`; A, D, dt_bias: `[nheads]` (D may be `[nheads, headdim]`).
        B, C: `[1, T, ngroups, dstate]`; cu_seqlens: `[num_seqs + 1]`.
        initial_states: `[num_seqs, nheads, headdim, dstate]` or None for zeros.
        out: `[1, T, nheads, headdim]`, written in place.
        track_seq_idx, track_end_locs: `[k]` (0.5.23): also return the state of that sequence at that packed position.

    Returns
        0.5.17 (`return_intermediate_states`): `(states, final)`; states `[1, 1 + sum(len // chunk_size), ...]`, entry
        `offset_i + c` is sequence i after its first `c` chunks, `offset_i = sum of len // chunk_size before i`, which
        is how 0.5.17 indexes it (its own kernel returns the packed grid instead, where only the first sequence of
        a batch is found: its radix snapshots of the others are wrong).
        0.5.23 (`return_track_states`): `(states, final, tracked)`; states `[1, ceil(T / chunk_size), ...]`, the state
        at each multiple of `chunk_size` of the packed batch.
        final: `[num_seqs, nheads, headdim, dstate]`, in `state_dtype`.
    """
    if cu_seqlens is None or not return_varlen_states or return_final_states or z is not None:
        raise NotImplementedError(
            "mamba_chunk_scan_combined on CPU implements the call of SGLang's MambaMixer2 only "
            "(cu_seqlens, return_varlen_states=True, return_final_states=False, z=None)"
        )
    if out is None:
        raise ValueError("mamba_chunk_scan_combined on CPU needs a preallocated out")
    state_dtype = state_dtype or x.dtype
    starts = cu_seqlens.tolist()
    num_seqs = len(starts) - 1
    nheads, headdim = x.shape[2:]
    ngroups, dstate = B.shape[2:]
    dt32 = dt[0].float()
    if dt_bias is not None:
        dt32 = dt32 + dt_bias.float()
    if dt_softplus:
        dt32 = F.softplus(dt32)
    dt32 = dt32.clamp(*dt_limit)
    x32, b32, c32 = x[0].float(), B[0].float(), C[0].float()
    group = nheads // ngroups

    segments = _segments(starts, chunk_size, on_grid=return_track_states)
    count = len(segments)
    longest = max((e - b for _, b, e in segments), default=0)
    place = torch.cat(
        [torch.arange(e - b) + j * longest for j, (_, b, e) in enumerate(segments)]
        or [torch.empty(0, dtype=torch.int64)]
    )
    tokens = torch.cat([torch.arange(b, e) for _, b, e in segments] or [torch.empty(0, dtype=torch.int64)])

    def segmented(t: torch.Tensor) -> torch.Tensor:
        """`[T, heads, ...]` -> `[count, heads, longest, ...]`, zero padded (dt 0 leaves the state alone)."""
        padded = t.new_zeros(count * longest, *t.shape[1:])
        padded[place] = t[tokens]
        return padded.view(count, longest, *t.shape[1:]).transpose(1, 2)

    dts = segmented(dt32)
    xs = segmented(x32) * dts.unsqueeze(-1)
    bs = segmented(b32).repeat_interleave(group, dim=1)
    cs = segmented(c32).repeat_interleave(group, dim=1)
    cum = (dts * A.float().view(1, nheads, 1)).cumsum(-1)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    y = ((cs @ bs.transpose(-1, -2)) * decay) @ xs
    c_in = cs * cum.exp().unsqueeze(-1)
    added = (xs * (cum[..., -1:] - cum).exp().unsqueeze(-1)).transpose(-1, -2) @ bs
    seg_decay = cum[..., -1].exp() if longest else cum.new_zeros(count, nheads)

    if initial_states is not None:
        state = initial_states.float().clone()
    else:
        state = x32.new_zeros(num_seqs, nheads, headdim, dstate)
    if return_track_states:
        grid = x32.new_zeros(-(-starts[-1] // chunk_size), nheads, headdim, dstate)
    else:
        whole = [(e - s) // chunk_size for s, e in itertools.pairwise(starts)]
        offset = [sum(whole[:i]) for i in range(num_seqs)]
        grid = x32.new_zeros(1 + sum(whole), nheads, headdim, dstate)
        grid[0] = state[0] if num_seqs else 0
    for j, (i, begin, end) in enumerate(segments):
        if return_track_states and begin % chunk_size == 0:
            grid[begin // chunk_size] = state[i]
        y[j] += c_in[j] @ state[i].transpose(-1, -2)
        state[i] = state[i] * seg_decay[j][:, None, None] + added[j]
        if not return_track_states and (end - starts[i]) % chunk_size == 0:
            grid[offset[i] + (end - starts[i]) // chunk_size] = state[i]
    flat = y.transpose(1, 2).reshape(count * longest, nheads, headdim)[place]
    if D is not None:
        skip = D.float() if D.dim() == 2 else D.float().unsqueeze(-1)
        flat = flat + skip * x32[tokens]
    out[0, tokens] = flat.to(out.dtype)

    final = state.to(state_dtype)
    states = grid.to(state_dtype).unsqueeze(0)
    if return_track_states:
        tracked = None
        if track_seq_idx is not None and track_end_locs is not None and track_end_locs.numel() > 0:
            first = initial_states.float() if initial_states is not None else torch.zeros_like(state)
            at = []
            for i, stop in zip(track_seq_idx.tolist(), track_end_locs.tolist(), strict=True):
                at.append(_state_at(starts[i], stop, first[i], dt32, x32, b32, A, group))
            tracked = torch.stack(at).to(state_dtype).unsqueeze(0)
        return states, final, tracked
    if return_intermediate_states:
        return states, final
    return (final,)


def _state_at(
    begin: int,
    stop: int,
    state: torch.Tensor,
    dt: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    group: int,
) -> torch.Tensor:
    """State `[nheads, headdim, dstate]` of one sequence after its packed tokens `[begin, stop)`."""
    cum = (dt[begin:stop] * A.float()).cumsum(0)
    weight = ((cum[-1:] - cum).exp() * dt[begin:stop]).unsqueeze(-1)
    keys = b[begin:stop].repeat_interleave(group, dim=1)
    added = torch.einsum("thp,thn->hpn", x[begin:stop] * weight, keys)
    return state * cum[-1].exp()[:, None, None] + added


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
) -> None:
    """The recurrence token by token: one decode token per request, or the T draft nodes of a verify step.

    Args
        state: pool `[slots, nheads, headdim, dstate]`; written unless `disable_state_update`.
        x, dt, z, out: `[bs, nheads, headdim]` or `[bs, T, nheads, headdim]`; out is written.
        A: `[nheads, headdim, dstate]`; D, dt_bias: `[nheads, headdim]`.
        B, C: `[bs, ngroups, dstate]` or `[bs, T, ngroups, dstate]`.
        state_batch_indices: `[bs]` slots; negative or `pad_slot_id` = padding (output 0, nothing written).
        intermediate_states_buffer: `[rows, >= T, nheads, headdim, dstate]`, receives the state after each node.
        intermediate_state_indices: `[bs]` rows of the buffer; defaults to `state_batch_indices`.
        retrieve_parent_token: `[bs, T]` parents, -1 for the root; None means a chain.
    """
    if out is None:
        raise ValueError("selective_state_update on CPU needs a preallocated out")
    single = x.dim() == 3
    x, dt, B, C, o = (t.unsqueeze(1) if single else t for t in (x, dt, B, C, out))
    z = z.unsqueeze(1) if single and z is not None else z
    bs, n, nheads, _ = x.shape
    if cache_steps is not None and cache_steps < n:
        raise ValueError(f"the snapshot buffer holds cache_steps={cache_steps} nodes, the step has {n}")
    group = nheads // B.shape[2]
    slots = torch.arange(bs) if state_batch_indices is None else state_batch_indices.long()
    alive = (slots >= 0) & (slots != pad_slot_id)
    root = state[slots.clamp(min=0)].float()
    root[~alive] = 0
    dt32 = dt.float()
    if dt_bias is not None:
        dt32 = dt32 + dt_bias.float()
    if dt_softplus:
        dt32 = F.softplus(dt32)
    x32 = x.float()
    b32 = B.float().repeat_interleave(group, dim=2)
    c32 = C.float().repeat_interleave(group, dim=2)
    rows = torch.arange(bs)
    keep_all = retrieve_parent_token is not None or intermediate_states_buffer is not None
    nodes = root.new_empty(bs, n, *root.shape[1:]) if keep_all else None
    parents = None if retrieve_parent_token is None else retrieve_parent_token[:bs].long()
    y = torch.empty_like(x32)
    current = root
    for i in range(n):
        if parents is not None and nodes is not None and i > 0:
            parent = parents[:, i]
            current = torch.where((parent < 0).view(bs, 1, 1, 1), root, nodes[rows, parent.clamp(min=0)])
        step = dt32[:, i].unsqueeze(-1)
        current = current * (step * A.float()).exp() + (step * x32[:, i].unsqueeze(-1)) * b32[:, i].unsqueeze(-2)
        y[:, i] = (current @ c32[:, i].unsqueeze(-1)).squeeze(-1)
        if nodes is not None:
            nodes[:, i] = current
    if D is not None:
        y = y + D.float() * x32
    if z is not None:
        y = y * F.silu(z.float())
    if not bool(alive.all()):
        y[~alive] = 0
    o.copy_(y)
    if intermediate_states_buffer is not None and nodes is not None:
        into = slots if intermediate_state_indices is None else intermediate_state_indices[:bs].long()
        intermediate_states_buffer[into[alive], :n] = nodes[alive].to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        state[slots[alive]] = current[alive].to(state.dtype)
