"""The window of Mamba2."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.arguments import FLOATS, Arg
from ..common.operands import Window


@dataclass(frozen=True, eq=False)
class Mamba2Window(Window):
    """Inputs of the recurrence, a token's of one layer at [row, position]; a verify writes those of its nodes.

    x   [(L,) R, C, H, P] float, a token's contiguous: channels after the convolution. P is headdim.
    B   [(L,) R, C, G, D] float, a token's contiguous: after the convolution. G groups, D is dstate.
    dt  [(L,) R, C, H] float32, a token's contiguous: final step size, after bias and softplus.
    """

    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor

    def check_reach(self) -> None:
        """Raise ValueError unless offsets within a row fit into 32 bits, in which the kernels count them."""
        for name in self.input_names():
            tensor = getattr(self, name)
            at_row = tensor.ndim - (3 if name == "dt" else 4)
            reach = tensor.stride(at_row + 1) * tensor.shape[at_row + 1]
            if reach > 2**31:
                raise ValueError(f"window_{name}: {reach} elements from a row's first to its last, expected up to 2^31")

    def inputs_as(self, leading: str) -> dict[str, Arg]:
        return {
            "window_x": Arg(self.x, f"{leading} H P", FLOATS, contiguous=2),
            "window_B": Arg(self.B, f"{leading} G D", FLOATS, contiguous=2),
            "window_dt": Arg(self.dt, f"{leading} H", torch.float32),
        }
