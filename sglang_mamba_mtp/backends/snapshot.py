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
    """SGLang's Mamba2 verify, for models too that forget to ask for the one convolution it works with.

    Falcon-H1 does up to 0.5.17 and dies in its first verify; later it asks as we do here.
    """

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """SGLang's mixer, ``hidden_states`` [T, hidden] in and out."""
        triton = use_triton_causal_conv or forward_batch.forward_mode.is_target_verify()
        return super().forward(mixer, hidden_states, output, layer_id, forward_batch, mup_vector, triton)


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
