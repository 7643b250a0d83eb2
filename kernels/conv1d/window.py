"""The window of the short convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.arguments import FLOATS, Arg
from ..common.operands import Window


@dataclass(frozen=True, eq=False)
class ConvWindow(Window):
    """Inputs of the convolution, a token's of one layer at [row, position]; a verify writes those of its nodes.

    inputs  [(L,) R, C, dim] float, a token's contiguous: before the convolution.
    """

    inputs: torch.Tensor

    def inputs_as(self, leading: str) -> dict[str, Arg]:
        return {"window_inputs": Arg(self.inputs, f"{leading} dim", FLOATS)}
