"""What the hooks do where the radix cache keeps its states in int8 (``--enable-int8-mamba-checkpoint``).

They lie in a pool of their own. SGLang quantises a request's slot, or its snapshot's, into it, and a request that hits
one has it written into its own slot. Nobody asks the mamba pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..state.pools import MtpMambaPool


def state_is_quantised(
    original: Callable[..., None],
    checkpoints: Any,
    active_mamba_pool: Any,
    active_slots: torch.Tensor,
    ckpt_slots: torch.Tensor,
) -> None:
    """AROUND `MambaCheckpointPool.store_from_active`: ``active_slots`` [n] are read here and now."""
    if not isinstance(active_mamba_pool, MtpMambaPool):  # a model, or a server without speculation, left to SGLang
        return original(checkpoints, active_mamba_pool, active_slots, ckpt_slots)
    with active_mamba_pool.read_by_sglang(active_slots):
        return original(checkpoints, active_mamba_pool, active_slots, ckpt_slots)


def state_is_loaded(
    checkpoints: Any, active_mamba_pool: Any, ckpt_slots: torch.Tensor, active_slots: torch.Tensor
) -> None:
    """BEFORE `MambaCheckpointPool.load_to_active`: what was known of ``active_slots`` [n] is their last owners'."""
    if isinstance(active_mamba_pool, MtpMambaPool):
        active_mamba_pool.overwritten_by_sglang(active_slots)
