"""The window of Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.arguments import FLOATS, Arg
from ..common.operands import Window


@dataclass(frozen=True, eq=False)
class GdnWindow(Window):
    """Inputs of the gated delta rule, a token's of one layer at [row, position]; a verify writes those of its nodes.

    k     [(L,) R, C, H, K] float, a token's contiguous: keys after the convolution, before normalisation.
    v     [(L,) R, C, HV, V] float, a token's contiguous.
    g     [(L,) R, C, HV] float32, a token's contiguous: log decay.
    beta  [(L,) R, C, HV] float32: write strength. Strides of g.
    factors
          [(L,) R, C, HV, 3] float32, a token's contiguous: e^g, 1 / |k| and beta / |k|, which the verifies that replay
          the token take as they are.
    """

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    factors: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta.stride() != self.g.stride():
            raise ValueError(f"window_beta: strides {self.beta.stride()}, expected window_g's {self.g.stride()}")

    def inputs_as(self, leading: str) -> dict[str, Arg]:
        return {
            "window_k": Arg(self.k, f"{leading} H K", FLOATS, contiguous=2),
            "window_v": Arg(self.v, f"{leading} HV V", FLOATS, contiguous=2),
            "window_g": Arg(self.g, f"{leading} HV", torch.float32),
            "window_beta": Arg(self.beta, f"{leading} HV", torch.float32),
            "window_factors": Arg(self.factors, f"{leading} HV 3", torch.float32, contiguous=2),
        }
