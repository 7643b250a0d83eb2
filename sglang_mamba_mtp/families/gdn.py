"""GDN, the gated delta rule (Qwen3-Next, Qwen3.5): keys and values after the convolution, log decay and beta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mamba_mtp_kernels import gdn
from mamba_mtp_kernels.gdn.window import GdnWindow

from ..compat import version
from .base import Family, FoldOp, TokenField, VerifyOp


class GdnFamily(Family):
    """Keys are kept as they leave the convolution (normalisation happens where they are used), so a fold starts from
    raw inputs."""

    window = GdnWindow
    longest_window = 256

    def fields(self, shape: Any, dtype: torch.dtype) -> Mapping[str, TokenField]:
        """``shape.temporal`` = (HV, V, K)."""
        value_heads, value_dim, key_dim = shape.temporal
        return {
            "k": TokenField((shape.num_k_heads_per_tp, key_dim), dtype),
            "v": TokenField((value_heads, value_dim), dtype),
            "g": TokenField((value_heads,), torch.float32),
            "beta": TokenField((value_heads,), torch.float32),
            "factors": TokenField((value_heads, 3), torch.float32),
        }

    def replay(self, device: torch.device) -> VerifyOp:
        return gdn.ops_for(device).verify

    def slots(self, device: torch.device) -> VerifyOp:
        return gdn.ops_for(device, version.version_numbers()).verify_slots

    def fold(self, device: torch.device, model: Any) -> FoldOp:
        """Needs nothing of ``model``."""
        return gdn.ops_for(device).fold
