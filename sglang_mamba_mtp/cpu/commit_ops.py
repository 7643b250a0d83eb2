"""Commit of a verify step and radix snapshots on CPU: SGLang's Triton state copies as torch index copies.

Layouts: pools `[layers, slots, *state]`, snapshots of draft nodes `[layers, rows, nodes, *state]`. Sources are gathered
before anything is written, so a slot may be source and destination at once.
"""

from __future__ import annotations

import torch


def scatter_states_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """`dst[:, dst_indices[i]] = src[:, row_i, step_indices[i]]` where the step and the slot are >= 0.

    Stands in for `fused_mamba_state_scatter_with_mask` and `fused_conv_window_scatter_with_mask`.

    Args
        dst: `[layers, slots, *state]`; src: `[layers, rows, nodes, *state]`, any strides.
        dst_indices_raw, step_indices_raw: `[n]`; a negative entry skips the request.
        src_indices_raw: `[n]` rows of src; defaults to 0..n-1.
    """
    steps = step_indices_raw.long()
    slots = dst_indices_raw.long()[: steps.shape[0]]
    rows = torch.arange(steps.shape[0]) if src_indices_raw is None else src_indices_raw.long()
    valid = (steps >= 0) & (slots >= 0)
    dst[:, slots[valid]] = src[:, rows[valid], steps[valid]].to(dst.dtype)


def scatter_conv_windows_multi(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    dst_indices2_raw: torch.Tensor | None = None,
    step_indices2_raw: torch.Tensor | None = None,
) -> None:
    """Stands in for 0.5.23's `fused_conv_window_scatter_multi`: several (dst, src) pairs, up to two index sets."""
    for dst, src in pairs:
        scatter_states_with_mask(dst, src, dst_indices_raw, step_indices_raw)
        if dst_indices2_raw is not None and step_indices2_raw is not None:
            scatter_states_with_mask(dst, src, dst_indices2_raw, step_indices2_raw)


def commit_track_indices(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    mamba_track_interval: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Node to commit and node to snapshot, per request. Stands in for 0.5.23's `fused_commit_track_indices`.

    Args
        accept_index: `[bs, depth]`, accepted rows of the flattened `[bs * draft_token_num]` nodes, root first.
        accept_lens: `[bs]`, accepted nodes, root included.
        seq_lens: `[bs]` lengths before the step, or None without snapshots.

    Returns
        `[bs]` int64 last accepted node, and `[bs]` int64 node at the last multiple of the interval that the step
        reaches (-1 where it reaches none), or None.
    """
    bs = accept_lens.shape[0]
    rows = torch.arange(bs)
    base = rows * draft_token_num
    lens = accept_lens.long()
    last = accept_index[rows, lens - 1].long() - base
    if seq_lens is None:
        return last, None
    before = seq_lens.long()
    after = before + lens
    boundary = after // mamba_track_interval * mamba_track_interval
    node = accept_index[rows, (boundary - before - 1).clamp(min=0)].long() - base
    crossed = before // mamba_track_interval != after // mamba_track_interval
    return last, torch.where(crossed, node, torch.full_like(node, -1))


def track_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy one layer's conv and SSM state of every masked request into its snapshot slot.

    Args
        conv_states, ssm_states: `[slots, *state]`, written in place.
        cache_indices, mamba_track_indices: `[bs]` source and destination slots; negative skips.
        mamba_track_mask: `[bs]` bool.
    """
    track_states_all_layers(
        conv_states.unsqueeze(0),
        ssm_states.unsqueeze(0),
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )


def track_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """As `track_states_if_needed`, for pools `[layers, slots, *state]`."""
    src = cache_indices[:batch_size].long()
    dst = mamba_track_indices[:batch_size].long()
    chosen = mamba_track_mask[:batch_size].bool() & (src >= 0) & (dst >= 0)
    src, dst = src[chosen], dst[chosen]
    conv_states_pool[:, dst] = conv_states_pool[:, src]
    ssm_states_pool[:, dst] = ssm_states_pool[:, src]
