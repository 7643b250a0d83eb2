"""Mamba2 (Nemotron-H, Granite 4, Falcon-H1): x and B after the convolution, and the final step size dt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mamba_mtp_kernels import mamba2
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.mamba2.window import Mamba2Window

from ..compat import version
from .base import Family, FoldOp, TokenField, VerifyOp


class Mamba2Family(Family):
    """A fold decays by the mixers' A, which is no input of a token."""

    window = Mamba2Window
    longest_window = 128

    def fields(self, shape: Any, dtype: torch.dtype) -> Mapping[str, TokenField]:
        """``shape.temporal`` = (nheads, headdim, dstate)."""
        heads, head_dim, state = shape.temporal
        groups = (shape.conv[0][0] - heads * head_dim) // (2 * state)
        return {
            "x": TokenField((heads, head_dim), dtype),
            "B": TokenField((groups, state), dtype),
            "dt": TokenField((heads,), torch.float32),
        }

    def replay(self, device: torch.device) -> VerifyOp:
        return mamba2.ops_for(device).mamba2_verify

    def slots(self, device: torch.device) -> VerifyOp:
        return mamba2.ops_for(device, version.version_numbers()).mamba2_verify_slots

    def fold(self, device: torch.device, model: Any) -> FoldOp:
        """Reads the A of ``model``'s mixers whenever it runs."""
        from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

        mixers = [module for module in model.modules() if isinstance(module, MambaMixer2)]
        run = mamba2.ops_for(device).mamba2_fold

        def fold(states: States, window: Mamba2Window, folds: Folds) -> None:
            run(states, window, folds, A=torch.stack([mixer.A.data for mixer in mixers]))

        return fold
