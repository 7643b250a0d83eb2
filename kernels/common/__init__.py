"""What every kernel family shares: draft trees (tree.py), the window's bookkeeping (commit.py), schedule.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class CommonOps(NamedTuple):
    """The bookkeeping ops of one device. Signatures: tree.build_tree, commit.commit_window, schedule.fold_first."""

    build_tree: Callable[..., None]
    commit_window: Callable[..., None]
    fold_first: Callable[..., None]


def ops_for(device: torch.device | str) -> CommonOps:
    """Triton on a CUDA device, PyTorch on the CPU. Call once, at construction."""
    kind = torch.device(device).type
    if kind == "cuda":
        from .commit import commit_window
        from .schedule import fold_first
        from .tree import build_tree

        return CommonOps(build_tree, commit_window, fold_first)
    if kind == "cpu":
        from .reference import build_tree_reference, commit_window_reference, fold_first_reference

        return CommonOps(build_tree_reference, commit_window_reference, fold_first_reference)
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
