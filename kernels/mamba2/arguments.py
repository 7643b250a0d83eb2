"""Argument forms shared by the Mamba2 launchers and their references."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..common.operands import check_nodes

MIN_DSTATE = 16  # what a tensor core takes at once


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


def parameters(
    dt: torch.Tensor, A: torch.Tensor, D: torch.Tensor | None, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dt [T, nheads] and A, D, dt_bias [nheads] of what SGLang's mixer hands. Raises ValueError as per_head."""
    return (
        per_head("dt", dt, 2),
        per_head("A", A, 1),
        None if D is None else per_head("D", D, 1),
        None if dt_bias is None else per_head("dt_bias", dt_bias, 1),
    )


def check_groups(nheads: int, ngroups: int) -> None:
    """Raise ValueError unless the heads are shared out evenly."""
    if nheads % ngroups:
        raise ValueError(f"B: {ngroups} groups do not divide {nheads} heads")


def check_sizes(nodes: int, nheads: int, ngroups: int, dstate: int) -> None:
    """Raise ValueError for a draft tree or heads that the replay verify has no tiles for."""
    check_nodes(nodes)
    if dstate < MIN_DSTATE:
        raise ValueError(f"B: dstate {dstate}, at least {MIN_DSTATE} needed")
    check_groups(nheads, ngroups)


class SlotsTiling(NamedTuple):
    """Launch shape: rows of a head in a program, and its warps."""

    block_p: int
    num_warps: int


def stock_tiling(dstate: int, sglang: tuple[int, ...] = (0, 5, 23)) -> SlotsTiling:
    """The launch shape of SGLang's selective_state_update: a program's rows of a head, and its warps.

    They decide in which order the dstate products of an output are summed, and so its last bits. 0.5.21 changed them
    for dstate 65..128, from (4, 4): a row's columns go to the 32 lanes of a warp four at a time in both if the state is
    fp32, but since 0.5.21 eight at a time to 16 lanes if it has 16 bits.
    """
    if dstate <= 16:
        return SlotsTiling(32, 4)
    if dstate <= 32:
        return SlotsTiling(16, 4)
    if dstate <= 64:
        return SlotsTiling(8, 4)
    if dstate <= 128:
        return SlotsTiling(8, 1) if sglang >= (0, 5, 21) else SlotsTiling(4, 4)
    return SlotsTiling(4, 8)
