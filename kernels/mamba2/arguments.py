"""Argument forms shared by the Mamba2 launchers and their references."""

from __future__ import annotations

import torch


def per_head(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """`tensor` cut to its first `dims` dimensions, the last of which is the head.

    SGLang's mixer hands A [nheads, headdim, dstate], D and dt_bias [nheads, headdim] and dt [T, nheads, headdim] as
    views expanded from one value a head. Raises ValueError if a further dimension really varies.
    """
    for axis in range(dims, tensor.dim()):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != 0:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}: must be one value a head, "
                f"so dimension {axis} must have stride 0"
            )
    if tensor.dim() < dims:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected at least {dims} dimensions")
    return tensor[(slice(None),) * dims + (0,) * (tensor.dim() - dims)]
