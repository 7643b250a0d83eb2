"""Mode `snapshot`: SGLang's verify and commit, with the fixes every mode shares."""

from __future__ import annotations

from typing import Any

import torch

from ..modes import GDN, MAMBA2
from .gdn import GdnBackend
from .mamba2 import Mamba2Backend


class SnapshotGdn(GdnBackend):
    """SGLang's GDN verify."""


class SnapshotMamba2(Mamba2Backend):
    """SGLang's Mamba2 verify."""


BACKENDS: dict[str, type] = {GDN: SnapshotGdn, MAMBA2: SnapshotMamba2}


def speculative_state(mamba_pool: Any) -> dict[str, int]:
    """Bytes really allocated for the states and conv windows of draft nodes (shared storage counts once)."""
    cache = mamba_pool.mamba_cache
    return {
        name: nbytes(tensors)
        for name, tensors in (
            ("states", getattr(cache, "intermediate_ssm", None)),
            ("conv windows", getattr(cache, "intermediate_conv_window", None)),
        )
        if tensors is not None
    }


def nbytes(tensors: torch.Tensor | list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = [tensor.untyped_storage() for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
