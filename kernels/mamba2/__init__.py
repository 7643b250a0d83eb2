"""Mamba2 (SSD) replay: verify.py scores a draft tree from checkpoint and window, fold.py moves the checkpoint on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Mamba2Ops(NamedTuple):
    """The Mamba2 ops of one device. Signatures: verify.mamba2_verify, fold.mamba2_fold."""

    mamba2_verify: Callable[..., torch.Tensor]
    mamba2_fold: Callable[..., None]


def ops_for(device: torch.device | str) -> Mamba2Ops:
    """Triton on a CUDA device, PyTorch on the CPU. Call once, at construction."""
    kind = torch.device(device).type
    if kind == "cuda":
        from .fold import mamba2_fold
        from .verify import mamba2_verify

        return Mamba2Ops(mamba2_verify, mamba2_fold)
    if kind == "cpu":
        from .reference import mamba2_fold_reference, mamba2_verify_reference

        return Mamba2Ops(mamba2_verify_reference, mamba2_fold_reference)
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
