"""Gated DeltaNet.

Replay: verify_replay.py scores draft nodes from state and window (window.py), fold.py folds accepted tokens exactly.
Slots: verify_slots.py scores them by plain recurrence and leaves every node's state in that node's slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch


class GdnOps(NamedTuple):
    """The GDN ops of one device. Signatures: verify_replay.gdn_verify, called right after conv1d_verify; fold.gdn_fold,
    verify_slots.gdn_verify_slots."""

    verify: Callable[..., torch.Tensor]
    fold: Callable[..., None]
    verify_slots: Callable[..., torch.Tensor]


def ops_for(device: torch.device | str, sglang: tuple[int, ...] = (0, 5, 23)) -> GdnOps:
    """Triton on a CUDA device, PyTorch on the CPU. Call once, at construction.

    sglang: the version whose bits verify_slots has.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        from .fold import gdn_fold
        from .verify_replay import gdn_verify
        from .verify_slots import gdn_verify_slots

        return GdnOps(partial(gdn_verify, after_convolution=True), gdn_fold, partial(gdn_verify_slots, sglang=sglang))
    if kind == "cpu":
        from .reference import gdn_fold_reference, gdn_verify_reference, gdn_verify_slots_reference

        return GdnOps(gdn_verify_reference, gdn_fold_reference, gdn_verify_slots_reference)
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
