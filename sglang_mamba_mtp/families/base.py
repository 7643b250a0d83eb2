"""What a family of models tells the rest of the plugin: the inputs of one step of its recurrence, and its kernels.

Everything else (pending counts, commits, settling, sizing) is one piece of code for all families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from mamba_mtp_kernels.common.operands import Window

VerifyOp = Callable[..., torch.Tensor]
FoldOp = Callable[..., None]


@dataclass(frozen=True)
class TokenField:
    """One input of the recurrence, kept for every window token: ``shape`` per token and layer, ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def bytes(self) -> int:
        """Bytes of one token in one layer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Family(ABC):
    """One family; the instances are in `families.table`.

    Attributes
        window: the class in which its kernels take a window; its inputs are named as in `fields`.
        longest_window: the longest window whose verify of 64 nodes fits the shared memory of a Hopper SM, 227 KiB.
            The verify is compiled for its window's length. (`tests/kernels/longest_window.py`)
    """

    window: ClassVar[type[Window]]
    longest_window: ClassVar[int]

    @abstractmethod
    def fields(self, shape: Any, dtype: torch.dtype) -> Mapping[str, TokenField]:
        """Window fields for SGLang's ``Mamba2StateShape`` (per tensor-parallel rank) and activations of ``dtype``."""

    @abstractmethod
    def replay(self, device: torch.device) -> VerifyOp:
        """The verify of replay mode for tensors on ``device``."""

    @abstractmethod
    def slots(self, device: torch.device) -> VerifyOp:
        """The verify of slots mode for tensors on ``device``, with the installed SGLang's bits."""

    @abstractmethod
    def fold(self, device: torch.device, model: Any) -> FoldOp:
        """The fold for tensors on ``device`` and the layers of ``model``."""
