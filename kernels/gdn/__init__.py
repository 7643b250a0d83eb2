"""Gated DeltaNet: verify of draft nodes by replay (verify.py), the exact fold of accepted ones (fold.py), verify with a
state a node (slots.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch


class GdnOps(NamedTuple):
    """The GDN ops of one device. Signatures: verify.gdn_verify, fold.gdn_fold, slots.gdn_verify_slots."""

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
        from .slots import gdn_verify_slots
        from .verify import gdn_verify

        return GdnOps(gdn_verify, gdn_fold, partial(gdn_verify_slots, sglang=sglang))
    if kind == "cpu":
        from .reference import gdn_fold_reference, gdn_verify_reference, gdn_verify_slots_reference

        return GdnOps(gdn_verify_reference, gdn_fold_reference, gdn_verify_slots_reference)
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
