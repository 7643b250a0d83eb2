"""What the launchers of both GDN verifies ask of a node's query and gates. No triton in this file."""

from __future__ import annotations

import torch

from ..common.arguments import FLOATS, Arg


def node_inputs(
    q: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> dict[str, Arg]:
    """For `check`, after B and N are known; binds H, K and HV."""
    return {
        "q": Arg(q, "B*N H K", FLOATS, contiguous=2),
        "a": Arg(a, "B*N HV", FLOATS),
        "b": Arg(b, "B*N HV", FLOATS),
        "A_log": Arg(A_log, "HV"),
        "dt_bias": Arg(dt_bias, "HV"),
    }


def check_groups(name: str, heads: int, key_heads: int) -> None:
    """Raise ValueError unless every key head serves the same number of value heads."""
    if heads % key_heads:
        raise ValueError(f"{name}: {heads} heads, expected a multiple of the keys' {key_heads}")
