"""Convolution of draft trees in plain PyTorch: the tests' oracle and the CPU engine's op.

Same keyword signatures as the Triton launchers, and the verifies take `compute_dtype`: torch.float64 is the oracle.
None computes as the kernel does (tap products in the operands' common dtype, float32 sum), or, in slots mode, as the
CPU engine's own verify does (sglang_mamba_mtp/cpu/conv1d_ops.py), whose bits it has to give. torch.float32 makes replay
mode's agree with that too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.operands import PLAN_NEWEST, PLAN_ROOT, Folds, NodeSlots, Rows
from .options import has_silu
from .parts import Part, parts_of
from .window import ConvWindow


def path_taps(last: torch.Tensor, parents: torch.Tensor, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `taps` newest inputs of the path that ends at node `last`, newest first.

    last [...] integer node ids, < 0 for the state before the root; parents [..., N] int32 rows matching `last`.
    Returns node [..., taps] int64, the tap's node or -1 where it is older than the root, and age [..., taps] int64,
    then the tap's distance from the newest entry of the old window (0, 1, ...).
    """
    current = last.to(torch.int64)
    older = torch.zeros_like(current)
    nodes, ages = [], []
    for _ in range(taps):
        nodes.append(current.clamp(min=-1))
        ages.append(older)
        older = older + (current < 0)
        above = parents.to(torch.int64).gather(-1, current.clamp(0, parents.shape[-1] - 1)[..., None])[..., 0]
        current = torch.where(current >= 0, above, -1)
    return torch.stack(nodes, -1), torch.stack(ages, -1)


def conv1d_verify_reference(
    x: torch.Tensor,
    *,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    rows: Rows,
    window: ConvWindow,
    parts: Sequence[Part] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution of every node along its own path. See verify_replay.conv1d_verify."""
    batch, nodes = rows.trees.shape
    dim, width = weight.shape
    silu = has_silu(activation)
    plan = rows.plan_for(nodes, window.fold_threshold).long()
    slot, row, before, _ = plan[:, :4].unbind(1)
    real = slot > 0
    inputs = x.reshape(batch, nodes, dim)
    newest = plan[:, PLAN_ROOT - width + 1 : PLAN_ROOT]
    old = _states_after(conv_states[None, slot], window.inputs[None], row, before, newest)[0]  # [B, dim, K-1]
    position = plan[:, PLAN_ROOT : PLAN_ROOT + nodes]
    window.inputs[row[real][:, None], position[real]] = inputs[real].to(window.inputs.dtype)

    links = torch.where(real[:, None], rows.trees, -1)
    node_ids = torch.arange(nodes, device=x.device).expand(batch, nodes)
    node, age = path_taps(node_ids, links[:, None, :].expand(batch, nodes, nodes), width)

    acc_dtype = compute_dtype or torch.float32
    acc = torch.zeros(batch, nodes, dim, dtype=acc_dtype, device=x.device)
    if bias is not None:
        acc = acc + bias.to(acc_dtype)
    for tap in range(width):  # oldest first, as stock's chain kernel sums
        back = width - 1 - tap
        from_tree = node[:, :, back, None]
        tree_value = inputs.gather(1, from_tree.clamp(min=0).expand(batch, nodes, dim))
        old_index = (width - 2 - age[:, :, back]).clamp(0, max(width - 2, 0))
        old_value = old.gather(2, old_index[:, None, :].expand(batch, dim, nodes)).transpose(1, 2)
        for value, chosen in ((tree_value, from_tree >= 0), (old_value, from_tree < 0)):
            if compute_dtype is None:
                product = (value * weight[:, tap]).to(acc_dtype)
            else:
                product = value.to(compute_dtype) * weight[:, tap].to(compute_dtype)
            acc = torch.where(chosen, acc + product, acc)
    if silu:
        acc = acc / (1 + torch.exp(-acc))
    out = torch.where(real[:, None, None], acc, 0)
    out = out if compute_dtype == torch.float64 else out.to(x.dtype)
    pieces = parts_of(parts, dim, x.dtype, window.order)
    split = list(out.split(pieces.widths, dim=-1))
    result = split.pop(pieces.result).flatten(0, 1)
    for kept, values in zip(pieces.kept, split, strict=True):
        if kept is not None:
            kept[row[real][:, None], position[real]] = values[real].unflatten(-1, kept.shape[2:]).to(kept.dtype)
    return result


def conv1d_verify_slots_reference(
    x: torch.Tensor,
    *,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    nodes: NodeSlots,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Convolution of every node, its window to its own slot. See verify_slots.conv1d_verify_slots."""
    read_slots, batch, count = nodes.read, nodes.read.shape[0], nodes.write.shape[1]
    write_slots = nodes.write[:batch]
    dim, width = weight.shape
    silu = has_silu(activation)
    acc_dtype = compute_dtype or torch.float32
    real = read_slots > 0
    inputs = x.reshape(batch, count, dim)
    old = conv_states[torch.where(real, read_slots, 0).to(torch.int64)].transpose(1, 2)  # [B, K-1, dim], oldest first
    if nodes.parents is None:
        links = torch.arange(-1, count - 1, device=x.device).expand(batch, count)
    else:
        links = torch.where(real[:, None], nodes.parents[:batch], -1)
    node_ids = torch.arange(count, device=x.device).expand(batch, count)
    node, age = path_taps(node_ids, links[:, None, :].expand(batch, count, count), width)
    # column of each tap in the old window followed by the nodes, oldest tap first
    column = torch.where(node >= 0, node + width - 1, width - 2 - age).clamp(min=0).flip(-1)
    each_row = torch.arange(batch, device=x.device).view(batch, 1, 1)
    taps = torch.cat([old.to(x.dtype), inputs], dim=1)[each_row, column]  # [B, N, K, dim]

    y = torch.einsum("bnwd,dw->bnd", taps.to(acc_dtype), weight.to(acc_dtype))
    if bias is not None:
        y = y + bias.to(acc_dtype)
    if silu:
        y = torch.nn.functional.silu(y)
    out = torch.where(real[:, None, None], y, 0).reshape(batch * count, dim)

    windows = torch.cat([old, inputs.to(old.dtype)], dim=1)[each_row, column[:, :, 1:]].transpose(2, 3)
    written = real[:, None] & (write_slots > 0)
    conv_states[write_slots[written].to(torch.int64)] = windows[written]
    return out if compute_dtype == torch.float64 else out.to(x.dtype)


def fold_conv_reference(conv_states: torch.Tensor, window: ConvWindow, folds: Folds) -> None:
    """Fold window tokens onto convolution states of all layers. See fold.fold_conv."""
    live = ((folds.src > 0) & (folds.dst > 0) & ((folds.counts > 0) | (folds.src != folds.dst))).nonzero()[:, 0]
    src, dst, count = folds.src[live].long(), folds.dst[live].long(), folds.counts[live].long()
    # a plain copy reads no window, and its row may be garbage
    row = torch.where(count > 0, folds.rows[live].long(), 0)
    taps = conv_states.shape[-1]
    token = count[:, None] - taps + torch.arange(taps, device=conv_states.device)
    newest = window.order[row].long().gather(1, token.clamp(min=0))
    conv_states[:, dst] = _states_after(conv_states[:, src], window.inputs, row, count, newest)


def commit_conv_reference(
    conv_states: torch.Tensor, window: ConvWindow, rows: Rows, *, after_commit: bool = False
) -> None:
    """Fold in place what a verify has folded. See fold.commit_conv; after_commit is of no effect here."""
    plan = rows.plan_for().long()
    plan = plan[plan[:, 3] > 0]
    slot, row, _, count = plan[:, :4].unbind(1)
    end = PLAN_ROOT - PLAN_NEWEST
    newest = plan[:, end - conv_states.shape[-1] : end]
    conv_states[:, slot] = _states_after(conv_states[:, slot], window.inputs, row, count, newest)


def _states_after(
    old: torch.Tensor, inputs: torch.Tensor, row: torch.Tensor, count: torch.Tensor, newest: torch.Tensor
) -> torch.Tensor:
    """old [L, B, dim, K-1], oldest entry first, after the first count [B] tokens of each row [B] of the window's inputs
    [L, R, C, dim], the last K-1 of which lie at newest [B, K-1], oldest first; of no meaning where there are fewer."""
    layers, _, dim, taps = old.shape
    token = count[:, None] - taps + torch.arange(taps, device=old.device)  # [B, K-1]; < 0: an old entry
    new = inputs[:, row[:, None], newest].transpose(2, 3).to(old.dtype)
    entry = (token + taps).clamp(max=taps - 1)[None, :, None, :].expand(layers, -1, dim, taps)
    return torch.where((token >= 0)[None, :, None, :], new, old.gather(3, entry))
