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

    def folds(self, folded: torch.Tensor) -> None:
        """A verify has folded ``folded`` [n] tokens of its rows, 0 where none."""
        self._add(0, folded)

    def settles(self, folded: torch.Tensor) -> None:
        """Somebody else than a verify has ``folded`` [n] tokens of slots folded, 0 where none."""
        self._add(2, folded)

    def moves(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """``slots`` [n] are being settled by copying from ``sources`` [n]: counted are those that differ."""
        self.values[2] += ((slots > 0) & (sources != slots)).sum()

    def _add(self, first: int, folded: torch.Tensor) -> None:
        self.values[first] += (folded > 0).sum()
        self.values[first + 1] += folded.sum()
