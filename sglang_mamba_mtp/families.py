"""What differs between model families: the inputs of one step of the recurrence, and the kernels of each mode.

Everything else (pending counts, commits, settling, accounting) is one piece of code for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mamba_mtp_kernels import gdn, mamba2
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.gdn.window import GdnWindow
from mamba_mtp_kernels.mamba2.window import Mamba2Window

from . import compat
from .drafts import VerifyOp
from .modes import GDN, MAMBA2
from .window import FoldOp, TokenField, WindowLayout


class GdnFamily:
    """Gated delta rule (Qwen3-Next, Qwen3.5): keys and values after the convolution, log decay and beta.

    Keys are kept as they leave the convolution (normalisation happens where they are used), so a fold starts from raw
    inputs.

    Attributes
        fold_first: whether the replay verify takes the order to start its rows in.
        window: the class in which its kernels take a window.
    """

    fold_first = False
    window = GdnWindow

    @staticmethod
    def fields(shape: Any, dtype: torch.dtype) -> Mapping[str, TokenField]:
        """Window fields for SGLang's ``Mamba2StateShape`` (``temporal`` = (HV, V, K), per tensor-parallel rank)."""
        value_heads, value_dim, key_dim = shape.temporal
        return {
            "k": TokenField((shape.num_k_heads_per_tp, key_dim), dtype),
            "v": TokenField((value_heads, value_dim), dtype),
            "g": TokenField((value_heads,), torch.float32),
            "beta": TokenField((value_heads,), torch.float32),
        }

    @staticmethod
    def replay(device: torch.device) -> VerifyOp:
        """The verify of replay mode for tensors on ``device``."""
        return gdn.ops_for(device).verify

    @staticmethod
    def slots(device: torch.device) -> VerifyOp:
        """The verify of slots mode for tensors on ``device``, with the installed SGLang's bits."""
        return gdn.ops_for(device, compat.version_numbers()).verify_slots

    @staticmethod
    def fold(device: torch.device, model: Any) -> FoldOp:
        """The family's fold for tensors on ``device``; a GDN fold needs nothing of ``model``."""
        return gdn.ops_for(device).fold


class Mamba2Family:
    """Mamba2 (Nemotron-H and others): x and B after the convolution, and the final step size dt."""

    fold_first = True
    window = Mamba2Window

    @staticmethod
    def fields(shape: Any, dtype: torch.dtype) -> Mapping[str, TokenField]:
        """Window fields for SGLang's ``Mamba2StateShape`` (``temporal`` = (nheads, headdim, dstate), per rank)."""
        heads, head_dim, state = shape.temporal
        groups = (shape.conv[0][0] - heads * head_dim) // (2 * state)
        return {
            "x": TokenField((heads, head_dim), dtype),
            "B": TokenField((groups, state), dtype),
            "dt": TokenField((heads,), torch.float32),
        }

    @staticmethod
    def replay(device: torch.device) -> VerifyOp:
        """The verify of replay mode for tensors on ``device``."""
        return mamba2.ops_for(device).mamba2_verify

    @staticmethod
    def slots(device: torch.device) -> VerifyOp:
        """The verify of slots mode for tensors on ``device``, with the installed SGLang's bits."""
        return mamba2.ops_for(device, compat.version_numbers()).mamba2_verify_slots

    @staticmethod
    def fold(device: torch.device, model: Any) -> FoldOp:
        """The family's fold for tensors on ``device``; it decays by the mixers' A, read when it runs."""
        from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

        mixers = [module for module in model.modules() if isinstance(module, MambaMixer2)]
        run = mamba2.ops_for(device).mamba2_fold

        def fold(states: States, window: Mamba2Window, folds: Folds) -> None:
            run(states, window, folds, A=torch.stack([mixer.A.data for mixer in mixers]))

        return fold


Family = type[GdnFamily] | type[Mamba2Family]

#: By the key of `modes`.
FAMILIES: dict[str, Family] = {GDN: GdnFamily, MAMBA2: Mamba2Family}


def window_layout(
    family: Family, cache_params: Any, *, layers: int, nodes: int, threshold: int, dtype: torch.dtype
) -> WindowLayout:
    """Window sizes for a model.

    ``cache_params`` is SGLang's ``Mamba2CacheParams``, ``layers`` how many linear-attention layers this rank holds,
    ``nodes`` the largest draft length, ``threshold`` the ``--mamba-mtp-window`` value and ``dtype`` the model's
    activation dtype.
    """
    return WindowLayout(
        layers=layers,
        nodes=nodes,
        threshold=threshold,
        kind=family.window,
        fields=family.fields(cache_params.shape, dtype),
        conv_dim=cache_params.shape.conv[0][0],
        conv_dtype=dtype,
    )
