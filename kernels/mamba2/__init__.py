"""Mamba2 (SSD). Replay: verify_replay.py scores a draft tree from checkpoint and window, fold.py moves the checkpoint
on. Slots: verify_slots.py scores it by plain recurrence and leaves every node's state in that node's slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch


class Mamba2Ops(NamedTuple):
    """The Mamba2 ops of one device. Signatures: verify_replay.mamba2_verify, fold.mamba2_fold,
    verify_slots.mamba2_verify_slots."""

    mamba2_verify: Callable[..., torch.Tensor]
    mamba2_fold: Callable[..., None]
    mamba2_verify_slots: Callable[..., torch.Tensor]


def ops_for(device: torch.device | str, sglang: tuple[int, ...] = (0, 5, 23)) -> Mamba2Ops:
    """Triton on a CUDA device, PyTorch on the CPU. Call once, at construction.

    sglang: the version whose bits mamba2_verify_slots has.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        from .fold import mamba2_fold
        from .verify_replay import mamba2_verify
        from .verify_slots import mamba2_verify_slots

        verify = partial(mamba2_verify, after_convolution=True)
        return Mamba2Ops(verify, mamba2_fold, partial(mamba2_verify_slots, sglang=sglang))
    if kind == "cpu":
        from .reference import mamba2_fold_reference, mamba2_verify_reference, mamba2_verify_slots_reference

        return Mamba2Ops(mamba2_verify_reference, mamba2_fold_reference, mamba2_verify_slots_reference)
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
