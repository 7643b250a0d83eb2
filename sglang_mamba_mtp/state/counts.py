"""Counts of what happens to states while serving, kept on the device: nothing is read in a step.

A pool's store gets one only where metrics are exported; without it a step does nothing for them.
"""

from __future__ import annotations

import torch

#: What is counted, in the order of `Counts.values`.
COUNTED = ("folds", "folded_tokens", "settles", "settled_tokens")


class Counts:
    """Running totals since the server's start.

    Attributes
        values: int64 [4] on the pool's device, in the order of `COUNTED`; written on the stream that folds.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(COUNTED), dtype=torch.int64, device=device)

    def folds(self, pending: torch.Tensor, slots: torch.Tensor, threshold: int) -> None:
        """A verify of ``slots`` [n] has folded where more than ``threshold`` of ``pending`` [S] were waiting."""
        self._add(0, self._held(pending, slots), threshold)

    def settles(self, pending: torch.Tensor, slots: torch.Tensor) -> None:
        """``slots`` [n] are being settled: counted are those that have anything pending."""
        self._add(2, self._held(pending, slots), 0)

    def moves(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """``slots`` [n] are being settled by copying from ``sources`` [n]: counted are those that differ."""
        self.values[2] += ((slots > 0) & (sources != slots)).sum()

    @staticmethod
    def _held(pending: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return pending.index_select(0, slots.reshape(-1).clamp(min=0))  # slot 0 is padding and holds nothing

    def _add(self, first: int, held: torch.Tensor, threshold: int) -> None:
        over = held > threshold
        self.values[first] += over.sum()
        self.values[first + 1] += (held * over).sum()
