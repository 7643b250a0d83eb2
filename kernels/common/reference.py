"""The common ops in plain PyTorch: the oracle of the tests and the op of the CPU engine.

Same keyword signatures as the Triton launchers. Vectorised over rows; the only Python loops run over the nodes of a
draft tree.
"""

from __future__ import annotations

import torch

from .axis_order import KV


def build_tree_reference(
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    retrieve_next_token: torch.Tensor | None,
    retrieve_next_sibling: torch.Tensor | None,
    batch: int,
) -> None:
    """Parents and ancestor masks of the draft trees from SGLang's links. See tree.build_tree."""
    nodes = parents.shape[1]
    device = parents.device
    if retrieve_next_token is None or retrieve_next_sibling is None:
        chain = torch.arange(-1, nodes - 1, device=device, dtype=torch.int64).expand(batch, nodes).clone()
    else:
        # column `nodes` collects the links that do not lead to a later node of the tree
        chain = torch.zeros(batch, nodes + 1, device=device, dtype=torch.int64)
        chain[:, 0] = -1
        for node in range(nodes):
            for links, parent in (
                (retrieve_next_token, torch.full((batch,), node, device=device)),
                (retrieve_next_sibling, chain[:, node].clone()),
            ):
                target = links[:batch, node].to(torch.int64)
                valid = (target > node) & (target < nodes) & (parent >= 0)
                chain.scatter_(1, torch.where(valid, target, nodes)[:, None], parent[:, None])
        chain = chain[:, :nodes].clone()
        chain[:, 0] = -1  # a one-node tree shares this column with the rejected links
    parents[:batch] = chain.to(parents.dtype)
    masks = torch.zeros(batch, nodes, device=device, dtype=torch.int64)
    for node in range(1, nodes):
        parent = chain[:, node].clamp(min=0)
        masks[:, node] = masks.gather(1, parent[:, None])[:, 0] | (torch.ones_like(parent) << parent)
    ancestors[:batch] = masks


def walk_to_root(last: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Which nodes lie on the path from the root to `last`, both included.

    last [B] integer, < 0 for an empty path; parents [>=B, N] integer, -1 at the root. Returns bool [B, N].
    """
    batch, nodes = last.shape[0], parents.shape[1]
    node_ids = torch.arange(nodes, device=last.device)
    on_path = torch.zeros(batch, nodes, dtype=torch.bool, device=last.device)
    current = last.to(torch.int64).clamp(max=nodes - 1)
    for _ in range(nodes):
        on_path |= node_ids == current[:, None]
        above = parents[:batch].to(torch.int64).gather(1, current.clamp(min=0)[:, None])[:, 0]
        current = torch.where(current > 0, above, -1)
    return on_path


def commit_window_reference(
    *,
    pending: torch.Tensor,
    window_row: torch.Tensor,
    order: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    parents: torch.Tensor,
    fold_threshold: int,
    track_count: torch.Tensor,
) -> None:
    """Accept the path to `last_correct`. See commit.commit_window."""
    batch, nodes, capacity = slots.shape[0], parents.shape[1], order.shape[1]
    real = slots > 0
    slot = torch.where(real, slots, 0).to(torch.int64)
    row = torch.where(real, rows, 0).to(torch.int64)
    before = pending[slot].to(torch.int64)
    kept = torch.where(before > fold_threshold, 0, before)

    on_path = walk_to_root(last_correct, parents)
    entry = torch.arange(capacity, device=order.device).expand(batch, capacity)
    node = entry - before[:, None]
    is_node = (node >= 0) & (node < nodes)
    accepted = is_node & on_path.gather(1, node.clamp(0, nodes - 1))
    is_kept = entry < kept[:, None]
    # stable sort by class: kept entries, then accepted nodes, then what is free
    permutation = torch.where(is_kept, 0, torch.where(accepted, 1, 2)).argsort(dim=1, stable=True)
    new_order = order[row].gather(1, permutation)
    new_pending = kept + on_path.sum(1)

    order[row[real]] = new_order[real]
    pending[slot[real]] = new_pending[real].to(pending.dtype)
    window_row[slot[real]] = row[real].to(window_row.dtype)
    if steps_to_track is None:
        track_count[:batch] = 0
    else:
        count = kept + walk_to_root(steps_to_track, parents).sum(1)
        track_count[:batch] = torch.where(real & (steps_to_track >= 0), count, 0).to(track_count.dtype)


def fold_first_reference(
    schedule: torch.Tensor, *, slots: torch.Tensor, pending: torch.Tensor, fold_threshold: int
) -> None:
    """Batch rows, those that fold in front. See schedule.fold_first."""
    real = slots > 0
    folds = real & (pending[torch.where(real, slots, 0).to(torch.int64)] > fold_threshold)
    schedule[: slots.shape[0]] = (~folds).to(torch.int32).argsort(stable=True).to(schedule.dtype)


def place_nodes_reference(
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    slots: torch.Tensor,
    rows: torch.Tensor,
    current_input: torch.Tensor,
    row_slot: torch.Tensor,
    first_draft_slot: int,
    nodes_per_row: int,
) -> None:
    """Where a verify reads and writes. See slots.place_nodes."""
    batch, nodes = slots.shape[0], write_slots.shape[1]
    real = slots > 0
    row = torch.where(real, rows, 0).to(torch.int64)
    newest = current_input[row]
    read = torch.where((newest > 0) & (row_slot[row] == slots), newest, slots)
    read_slots[:batch] = torch.where(real, read, 0).to(read_slots.dtype)
    draft_slots = first_draft_slot + row[:, None] * nodes_per_row + torch.arange(nodes, device=slots.device)
    write_slots[:batch] = torch.where(real[:, None], draft_slots, 0).to(write_slots.dtype)


def commit_slots_reference(
    *,
    current_input: torch.Tensor,
    row_slot: torch.Tensor,
    slot_row: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    first_draft_slot: int,
    nodes_per_row: int,
    track_src: torch.Tensor,
) -> None:
    """Move the accepted rows' inputs to their last nodes. See slots.commit_slots."""
    batch = slots.shape[0]
    accepts = (slots > 0) & (last_correct >= 0)
    slot, row = slots[accepts].to(torch.int64), rows[accepts].to(torch.int64)
    newest = first_draft_slot + row * nodes_per_row + last_correct[accepts]
    current_input[row] = newest.to(current_input.dtype)
    row_slot[row] = slot.to(row_slot.dtype)
    slot_row[slot] = row.to(slot_row.dtype)
    if steps_to_track is None:
        track_src[:batch] = 0
    else:
        tracked = first_draft_slot + rows.to(torch.int64) * nodes_per_row + steps_to_track
        track_src[:batch] = torch.where((slots > 0) & (steps_to_track >= 0), tracked, 0).to(track_src.dtype)


def _drafted(
    slots: torch.Tensor, current_input: torch.Tensor, row_slot: torch.Tensor, slot_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row that last committed for each slot [B] int64 (0 for none), and its draft slot or -1."""
    row = slot_row[slots.clamp(min=0).to(torch.int64)].to(torch.int64)
    served = (slots > 0) & (row >= 0)
    row = row.clamp(min=0)
    served &= (row_slot[row] == slots) & (current_input[row] > 0)
    return row, torch.where(served, current_input[row], -1)


def newest_slots_reference(
    newest: torch.Tensor,
    *,
    slots: torch.Tensor,
    current_input: torch.Tensor,
    row_slot: torch.Tensor,
    slot_row: torch.Tensor,
) -> None:
    """Where each slot's newest state lies. See slots.newest_slots."""
    _, drafted = _drafted(slots, current_input, row_slot, slot_row)
    newest[: slots.shape[0]] = torch.where(drafted > 0, drafted, slots.clamp(min=0)).to(newest.dtype)


def forget_inputs_reference(
    *, slots: torch.Tensor, current_input: torch.Tensor, row_slot: torch.Tensor, slot_row: torch.Tensor
) -> None:
    """current_input -1 in the rows that serve the slots. See slots.forget_inputs."""
    row, drafted = _drafted(slots, current_input, row_slot, slot_row)
    current_input[row[drafted > 0]] = -1


def move_states_reference(states: torch.Tensor, *, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Copy whole slots in every layer. See move.move_states."""
    moves = (src_slots > 0) & (dst_slots > 0)
    states[:, dst_slots[moves].to(torch.int64)] = states[:, src_slots[moves].to(torch.int64)]


def turn_states_reference(
    states: torch.Tensor, state_layout: torch.Tensor, *, slots: torch.Tensor, layout: int
) -> None:
    """Bring slots into `layout`. See turn.turn_states."""
    real = slots[slots > 0].to(torch.int64)
    turning = real[state_layout[real] != layout]
    values, keys = states.shape[3:]
    heads = states[:, turning]
    lying = heads if layout == KV else heads.reshape(*heads.shape[:3], keys, values)
    states[:, turning] = lying.transpose(3, 4).reshape(heads.shape)
    state_layout[real] = layout
