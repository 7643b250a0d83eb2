"""Causal depthwise conv1d on CPU: prefill, decode, and verify of draft chains and trees.

Source: the depthwise causal convolution of Mamba (arXiv:2312.00752, section 3.4), with SGLang's cache layout: a slot
holds the last `width - 1` inputs, oldest first, `conv_states[slot]: [dim, width - 1]`. All sums run in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_mamba_mtp.cpu._tree import chain_parents, parents_from_links


def _activate(y: torch.Tensor, activation: str | bool | None) -> torch.Tensor:
    if activation in (True, "silu", "swish"):
        return F.silu(y)
    if activation in (None, False, "", "identity"):
        return y
    raise ValueError(f"causal conv1d: activation={activation!r} is not supported on CPU; use 'silu' or None")


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    **_unused: object,
) -> torch.Tensor:
    """Convolve packed sequences and leave each one's last inputs in its slot.

    Args
        x: `[dim, T]`, sequences packed along T.
        weight: `[dim, width]`; `bias`: `[dim]` or None.
        conv_states: `[slots, dim, width - 1]`, written in place.
        query_start_loc: `[num_seqs + 1]` integer offsets into T.
        seq_lens_cpu: lengths on the host, if the caller has them.
        cache_indices: `[num_seqs]` slots; a negative slot is padding and neither read nor written.
        has_initial_state: `[num_seqs]` bool; False starts from zeros.

    Returns
        `[dim, T]` in x's dtype.
    """
    if conv_states is None or query_start_loc is None or cache_indices is None:
        raise ValueError("causal_conv1d_fn on CPU needs conv_states, query_start_loc and cache_indices")
    starts = query_start_loc.tolist()
    slots = cache_indices.tolist()
    keeps = has_initial_state.tolist() if has_initial_state is not None else [False] * len(slots)
    dim, width = weight.shape
    window = width - 1
    # One padded copy of the whole batch: every sequence is preceded by its own `width - 1` history columns.
    pieces = []
    for i, slot in enumerate(slots):
        history = conv_states[slot].to(x.dtype) if keeps[i] and slot >= 0 else x.new_zeros(dim, window)
        pieces += [history, x[:, starts[i] : starts[i + 1]]]
    padded = torch.cat(pieces, dim=1)
    y = F.conv1d(
        padded.float().unsqueeze(0),
        weight.float().unsqueeze(1),
        bias.float() if bias is not None else None,
        groups=dim,
    ).squeeze(0)
    y = _activate(y, activation).to(x.dtype)
    out = torch.zeros_like(x)
    column = 0
    for i, slot in enumerate(slots):
        length = starts[i + 1] - starts[i]
        out[:, starts[i] : starts[i + 1]] = y[:, column : column + length]
        if slot >= 0 and length > 0:
            end = column + window + length
            conv_states[slot] = padded[:, end - window : end].to(conv_states.dtype)
        column += window + length
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **_unused: object,
) -> torch.Tensor:
    """One decode token per request, or all draft nodes of a verify step.

    Args
        x: `[bs, dim]` (decode) or `[bs, dim, N]` (N tokens; a verify step when `intermediate_conv_window` is given).
        conv_state: `[slots, dim, width - 1]`. Decode shifts it in place; a verify step leaves it alone, commit
            writes it (stock's kernel overwrites it and lets commit repair it, the result after commit is the same).
        conv_state_indices: `[bs]` slots, negative = padding (output 0, nothing written).
        intermediate_conv_window: `[rows, >= N, dim, width - 1]`, receives the window after each node.
        intermediate_state_indices: `[bs]` row of each request in it; defaults to 0..bs-1.
        retrieve_next_token, retrieve_next_sibling: `[bs, N]` tree links; None means a chain.
        retrieve_parent_token: `[bs, N]`, filled in place from the links; the SSM op reads it.

    Returns
        x's shape and dtype.
    """
    if cache_seqlens is not None or num_accept_tokens is not None:
        raise NotImplementedError("causal_conv1d_update on CPU: cache_seqlens and num_accept_tokens are not supported")
    nodes = x.unsqueeze(-1) if x.dim() == 2 else x
    bs, _, n = nodes.shape
    window = weight.shape[1] - 1
    slots = torch.arange(bs) if conv_state_indices is None else conv_state_indices.to(torch.int64)
    alive = slots >= 0
    history = conv_state[slots.clamp(min=0)].to(nodes.dtype)
    # Columns: width - 1 history inputs, then the nodes. `taps[b, i, j]` is the column j steps up node i's path.
    columns = torch.cat([history, nodes], dim=-1)
    if retrieve_next_token is not None and retrieve_next_sibling is not None:
        parents = parents_from_links(retrieve_next_token[:bs], retrieve_next_sibling[:bs])
        if retrieve_parent_token is not None:
            retrieve_parent_token[:bs].copy_(parents)
    else:
        parents = chain_parents(bs, n)
    up = torch.cat([torch.arange(-1, window - 1).expand(bs, window), parents + window], dim=1)
    taps = torch.empty(bs, n, window + 1, dtype=torch.int64)
    taps[:, :, 0] = torch.arange(window, window + n)
    for j in range(1, window + 1):
        taps[:, :, j] = up.gather(1, taps[:, :, j - 1].clamp(min=0))
    chronological = taps.flip(-1)
    # [bs, n, width, dim]: the output must be contiguous per node, GDNAttnBackend views it as [bs * n, dim].
    gathered = columns.transpose(1, 2)[torch.arange(bs).view(bs, 1, 1), chronological]
    y = torch.einsum("bnwd,dw->bnd", gathered.float(), weight.float())
    if bias is not None:
        y = y + bias.float()
    y = _activate(y, activation).to(x.dtype)
    if not bool(alive.all()):
        y[~alive] = 0
    after = gathered[:, :, 1:].transpose(2, 3)
    if intermediate_conv_window is not None:
        rows = torch.arange(bs) if intermediate_state_indices is None else intermediate_state_indices[:bs].long()
        windows = after.to(intermediate_conv_window.dtype)
        # Node by node: with a deduplicated (overlapping) buffer the windows alias each other.
        for i in range(n):
            intermediate_conv_window[rows[alive], i] = windows[alive, i]
    else:
        conv_state[slots[alive]] = after[alive, -1].to(conv_state.dtype)
    return y.transpose(1, 2) if x.dim() == 3 else y.squeeze(1)
