"""What every kernel family shares.

arguments.py    checks of a launcher's tensors
operands.py     the dataclasses in which they travel
grid.py         how many programs a launch may have; dependent.py: kernels that start while the one before them runs
tree.py         draft trees; chain.py: those that are chains
window.py       commits to replay mode's windows
plan.py         where a step's rows stand in their windows, and the order in which a verify starts them
pending.py      how many tokens of a slot are pending, and how many of them a verify folds
draft_slots.py  slots mode's bookkeeping: where each request's newest state lies
axis_order.py   the two axis orders of a state; turn.py: from one into the other; tile.py: a tile of either
move.py         copies of whole slots
ask.py          lines of memory asked for before they can be loaded
fragments.py    tiles as tensor cores take them, factors in addends; elementary.py: exact exponentials and their like
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class CommonOps(NamedTuple):
    """The common ops of one device. Signatures: tree.build_tree, window.commit_window, plan.plan_rows,
    draft_slots.*, turn.turn_states, move.move_states."""

    build_tree: Callable[..., None]
    commit_window: Callable[..., None]
    plan_rows: Callable[..., None]
    place_nodes: Callable[..., None]
    commit_slots: Callable[..., None]
    newest_slots: Callable[..., None]
    forget_inputs: Callable[..., None]
    turn_states: Callable[..., None]
    move_states: Callable[..., None]


def ops_for(device: torch.device | str) -> CommonOps:
    """Triton on a CUDA device, PyTorch on the CPU. Call once, at construction."""
    kind = torch.device(device).type
    if kind == "cuda":
        from .draft_slots import commit_slots, forget_inputs, newest_slots, place_nodes
        from .move import move_states
        from .plan import plan_rows
        from .tree import build_tree
        from .turn import turn_states
        from .window import commit_window

        return CommonOps(
            build_tree=build_tree,
            commit_window=commit_window,
            plan_rows=plan_rows,
            place_nodes=place_nodes,
            commit_slots=commit_slots,
            newest_slots=newest_slots,
            forget_inputs=forget_inputs,
            turn_states=turn_states,
            move_states=move_states,
        )
    if kind == "cpu":
        from . import reference

        return CommonOps(
            build_tree=reference.build_tree_reference,
            commit_window=reference.commit_window_reference,
            plan_rows=reference.plan_rows_reference,
            place_nodes=reference.place_nodes_reference,
            commit_slots=reference.commit_slots_reference,
            newest_slots=reference.newest_slots_reference,
            forget_inputs=reference.forget_inputs_reference,
            turn_states=reference.turn_states_reference,
            move_states=reference.move_states_reference,
        )
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
