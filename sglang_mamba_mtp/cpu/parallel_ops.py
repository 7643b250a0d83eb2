"""What ranks with attention of their own do with each other's tokens, in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def memcpy_cpu(
    dst: torch.Tensor, src: torch.Tensor, dim: int, offset: torch.Tensor, sz: torch.Tensor, offset_src: bool
) -> None:
    """Copy ``sz`` rows to row ``offset`` of ``dst`` `[T, ...]` or, with ``offset_src``, from row ``offset`` of ``src``.

    ``offset`` and ``sz`` are tensors of one integer each; ``dim`` is 0. SGLang's `memcpy_triton`.
    """
    assert dim == 0, "rows are copied"
    first, rows = int(offset), int(sz)
    if offset_src:
        dst[:rows] = src[first : first + rows]
    else:
        dst[first : first + rows] = src[:rows]


def own_experts_only(moe: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """SGLang's ``moe_forward_native``, which knows no experts of other ranks (id -1): this rank's first is asked in
    their place, and weighs nothing. One choice of each token at a time, since SGLang asks nobody twice."""

    @functools.wraps(moe)
    def forward(layer: Any, x: torch.Tensor, topk_output: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        elsewhere = topk_output.topk_ids < 0
        if not bool(elsewhere.any()):
            return moe(layer, x, topk_output, *args, **kwargs)
        weights = topk_output.topk_weights.masked_fill(elsewhere, 0.0).split(1, dim=1)
        ids = topk_output.topk_ids.masked_fill(elsewhere, 0).split(1, dim=1)
        choices = (topk_output._replace(topk_weights=w, topk_ids=i) for w, i in zip(weights, ids, strict=True))
        return torch.stack([moe(layer, x, choice, *args, **kwargs) for choice in choices]).sum(0)

    return forward


def _group(name: str) -> Any:
    from sglang.srt.distributed import parallel_state

    return parallel_state._groups[name]()


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """``input`` `[T, ...]` of every rank of a group, one after the other, into ``output`` `[ranks * T, ...]`."""
    _group(group_name)._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """This rank's part of the sum of all ranks' ``input`` `[ranks * T, ...]` into ``output`` `[T, ...]`."""
    _group(group_name)._reduce_scatter_tensor(output, input)
