"""The common ops in plain PyTorch: the oracle of the tests and the op of the CPU engine.

Same keyword signatures as the Triton launchers. Vectorised over rows; the only Python loops run over the nodes of a
draft tree.
"""

from __future__ import annotations

import torch

from .axis_order import KV
from .operands import PLAN_NEWEST, Rows, SlotBooks, States, Window, check_lengths, check_nodes


def build_tree_reference(
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch: int,
) -> None:
    """Parents and ancestor masks of the draft trees from SGLang's links. See tree.build_tree."""
    nodes = parents.shape[1]
    check_nodes(nodes)
    device = parents.device
    # column `nodes` collects the links that do not lead to a later node of the tree
    above = torch.zeros(batch, nodes + 1, device=device, dtype=torch.int64)
    above[:, 0] = -1
    for node in range(nodes):
        for links, parent in (
            (retrieve_next_token, torch.full((batch,), node, device=device)),
            (retrieve_next_sibling, above[:, node].clone()),
        ):
            target = links[:batch, node].to(torch.int64)
            valid = (target > node) & (target < nodes) & (parent >= 0)
            above.scatter_(1, torch.where(valid, target, nodes)[:, None], parent[:, None])
    parents[:batch] = above[:, :nodes].to(parents.dtype)
    masks = torch.zeros(batch, nodes, device=device, dtype=torch.int64)
    for node in range(1, nodes):
        parent = above[:, node].clamp(min=0)
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
        current = torch.where(above < current, above, -1)  # parents fall strictly in a valid tree
    return on_path


def entries_from(positions: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """positions [B, C] without the first `first` [B] int64 entries of each row; what then ends a row means nothing."""
    entry = torch.arange(positions.shape[1], device=positions.device) + first[:, None]
    return positions.gather(1, entry.clamp(max=positions.shape[1] - 1))


def first_entries(
    held: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """held [R, C, ...] of each row's first counts[b] positions [B, C], as [max(counts), B, ...], rows [B].

    Entries past a row's count may be NaN in the window. Here they are zeros, which leave a state as it is.
    """
    most = int(counts.max()) if counts.numel() else 0
    live = torch.arange(most, device=counts.device)[:, None] < counts
    return torch.where(live.view(*live.shape, *(1,) * (held.dim() - 2)), held[rows, positions[:, :most].T], 0)


def lie_as_kv(states: States, slots: torch.Tensor) -> torch.Tensor:
    """bool [B]: which of slots [B], int64 in range, lie as KV (axis_order.py)."""
    if states.axis_order is None:
        return torch.zeros_like(slots, dtype=torch.bool)
    return states.axis_order[slots] == KV


def load_states(states: States, slots: torch.Tensor) -> torch.Tensor:
    """A copy of one layer's states of slots [B], int64 in range: [B, H, V, K], each read as it lies.

    Contiguous: a product of matrices that lie otherwise has other bits on some CPUs.
    """
    found = states.data[slots]
    if states.axis_order is None:
        return found
    turned = found.reshape(*found.shape[:2], found.shape[3], found.shape[2]).transpose(2, 3).contiguous()
    return torch.where(lie_as_kv(states, slots)[:, None, None, None], turned, found)


def store_states(states: States, slots: torch.Tensor, values: torch.Tensor, is_kv: torch.Tensor) -> None:
    """Write values [B, H, V, K] to slots [B] of one layer, laid out as is_kv [B] bool says."""
    turned = values.transpose(2, 3).reshape(values.shape)
    states.data[slots] = torch.where(is_kv[:, None, None, None], turned, values).to(states.data.dtype)


def commit_window_reference(
    window: Window,
    rows: Rows,
    *,
    window_row: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    track_count: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    """Accept the path to `last_correct`. See window.commit_window."""
    check_lengths(window, lengths)
    pending, order, slots = window.pending, window.order, rows.slots
    parents = rows.trees
    batch, nodes, capacity = slots.shape[0], parents.shape[1], order.shape[1]
    real = slots > 0
    slot = torch.where(real, slots, 0).to(torch.int64)
    row = torch.where(real, rows.rows, 0).to(torch.int64)
    before = pending[slot].to(torch.int64)
    folding = window.folding(slot).to(torch.int64)
    kept = before - folding

    on_path = walk_to_root(last_correct, parents)
    entry = torch.arange(capacity, device=order.device).expand(batch, capacity)
    node = entry - before[:, None]
    is_node = (node >= 0) & (node < nodes)
    accepted = is_node & on_path.gather(1, node.clamp(0, nodes - 1))
    is_kept = (entry >= folding[:, None]) & (entry < before[:, None])
    # stable sort by class: kept entries, then accepted nodes, then what is free
    permutation = torch.where(is_kept, 0, torch.where(accepted, 1, 2)).argsort(dim=1, stable=True)
    new_order = order[row].gather(1, permutation)
    new_pending = kept + on_path.sum(1)

    order[row[real]] = new_order[real]
    pending[slot[real]] = new_pending[real].to(pending.dtype)
    window_row[slot[real]] = row[real].to(window_row.dtype)
    if window.newest is not None and window.length is not None and lengths is not None:
        accepted_total = on_path.sum(1)
        newest = torch.minimum(accepted_total + lengths % window.page, new_pending)
        window.newest[slot[real]] = newest[real].to(window.newest.dtype)
        window.length[slot[real]] = (lengths + accepted_total)[real].to(window.length.dtype)
    if steps_to_track is None:
        track_count[:batch] = 0
    else:
        count = kept + walk_to_root(steps_to_track, parents).sum(1)
        track_count[:batch] = torch.where(real & (steps_to_track >= 0), count, 0).to(track_count.dtype)


def plan_rows_reference(window: Window, rows: Rows, *, nodes: int) -> None:
    """Where every row stands in its window. See plan.plan_rows."""
    plan, batch, order = rows.plan_for(nodes, window.fold_threshold), rows.batch, window.order
    real = rows.slots > 0
    slot, row = (torch.where(real, index, 0).to(torch.int64) for index in (rows.slots, rows.rows))
    before = torch.where(real, window.pending[slot], 0).to(torch.int64)
    folding = torch.where(real, window.folding(slot), 0).to(torch.int64)
    plan[:, :4] = torch.stack([slot, row, before, folding], dim=1)
    last = [(counted - PLAN_NEWEST, PLAN_NEWEST) for counted in (folding, before)]
    start = 4
    for first, count in (*last, (before, nodes), (folding, window.fold_threshold)):
        entry = first[:, None] + torch.arange(count, device=order.device)
        there = real[:, None] & (entry >= 0) & (entry < order.shape[1])
        positions = order[row[:, None], entry.clamp(0, order.shape[1] - 1)]
        plan[:, start : start + count] = torch.where(there, positions, 0)
        start += count
    if rows.schedule is not None:
        folds = real & (before > window.fold_threshold)
        rows.schedule[:batch] = (~folds).to(torch.int32).argsort(stable=True).to(rows.schedule.dtype)


def place_nodes_reference(read_slots: torch.Tensor, write_slots: torch.Tensor, rows: Rows, books: SlotBooks) -> None:
    """Where a verify reads and writes. See draft_slots.place_nodes."""
    slots, batch, nodes = rows.slots, rows.batch, write_slots.shape[1]
    real = slots > 0
    row = torch.where(real, rows.rows, 0).to(torch.int64)
    newest = books.current_input[row]
    before_draft_slots = books.first_draft_slot + row * books.slots_per_row - 1
    root = torch.where((newest > 0) & (books.row_slot[row] == slots), newest - before_draft_slots, 0)
    place = (root[:, None] + torch.arange(nodes, device=slots.device)) % (books.slots_per_row + 1)
    placed = torch.where(place == 0, slots[:, None], before_draft_slots[:, None] + place)
    write_slots[:batch] = torch.where(real[:, None], placed, 0).to(write_slots.dtype)
    read_slots[:batch] = write_slots[:batch, 0]


def commit_slots_reference(
    books: SlotBooks,
    rows: Rows,
    *,
    write_slots: torch.Tensor,
    last_correct: torch.Tensor,
    steps_to_track: torch.Tensor | None,
    track_src: torch.Tensor,
) -> None:
    """Move the accepted rows' inputs to their last nodes. See draft_slots.commit_slots."""
    slots, batch = rows.slots, rows.batch

    def slot_of(node: torch.Tensor) -> torch.Tensor:
        at = node.clamp(0, write_slots.shape[1] - 1).to(torch.int64)
        return write_slots[:batch].gather(1, at[:, None])[:, 0]

    accepts = (slots > 0) & (last_correct >= 0)
    slot, row = slots[accepts].to(torch.int64), rows.rows[accepts].to(torch.int64)
    newest = slot_of(last_correct)[accepts]
    books.current_input[row] = torch.where(newest == slot, -1, newest).to(books.current_input.dtype)
    books.row_slot[row] = slot.to(books.row_slot.dtype)
    books.slot_row[slot] = row.to(books.slot_row.dtype)
    if steps_to_track is None:
        track_src[:batch] = 0
    else:
        tracked = (slots > 0) & (steps_to_track >= 0)
        track_src[:batch] = torch.where(tracked, slot_of(steps_to_track), 0).to(track_src.dtype)


def _drafted(slots: torch.Tensor, books: SlotBooks) -> tuple[torch.Tensor, torch.Tensor]:
    """The row that last committed for each slot [B] int64 (0 for none), and its draft slot or -1."""
    row = books.slot_row[slots.clamp(min=0).to(torch.int64)].to(torch.int64)
    served = (slots > 0) & (row >= 0)
    row = row.clamp(min=0)
    served &= (books.row_slot[row] == slots) & (books.current_input[row] > 0)
    return row, torch.where(served, books.current_input[row], -1)


def newest_slots_reference(newest: torch.Tensor, books: SlotBooks, *, slots: torch.Tensor) -> None:
    """Where each slot's newest state lies. See draft_slots.newest_slots."""
    _, drafted = _drafted(slots, books)
    newest[: slots.shape[0]] = torch.where(drafted > 0, drafted, slots.clamp(min=0)).to(newest.dtype)


def forget_inputs_reference(books: SlotBooks, *, slots: torch.Tensor) -> None:
    """current_input -1 in the rows that serve the slots. See draft_slots.forget_inputs."""
    row, drafted = _drafted(slots, books)
    books.current_input[row[drafted > 0]] = -1


def move_states_reference(states: torch.Tensor, *, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Copy whole slots in every layer. See move.move_states."""
    moves = (src_slots > 0) & (dst_slots > 0)
    states[:, dst_slots[moves].to(torch.int64)] = states[:, src_slots[moves].to(torch.int64)]


def turn_states_reference(states: torch.Tensor, axis_order: torch.Tensor, *, slots: torch.Tensor, to: int) -> None:
    """Bring slots into the order `to`. See turn.turn_states."""
    real = slots[slots > 0].to(torch.int64)
    turning = real[axis_order[real] != to]
    values, keys = states.shape[3:]
    heads = states[:, turning]
    lying = heads if to == KV else heads.reshape(*heads.shape[:3], keys, values)
    states[:, turning] = lying.transpose(3, 4).reshape(heads.shape)
    axis_order[real] = to
