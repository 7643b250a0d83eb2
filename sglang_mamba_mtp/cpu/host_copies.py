"""SGLang's copies between a pool and its host tier (`sgl_kernel.kvcacheio`, backend ``direct``), where both are host
memory. Done when they return, so whatever stream they are issued on is in order.

A pool is a list of tensors [tokens, ...], a layer each (``lf``); the host keeps pages of all layers, [pages, L,
page_size, ...] (``pf``), one tensor for each kind of thing in the pool (keys and values; or a state).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``dst[dst_indices] = src[src_indices]``, tensor by tensor; indices of tokens, [n]."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """To the host: tokens ``src_indices`` [n] of all layers to places ``dst_indices`` [n]. ``src_ptrs``: all layers of
    the first kind, then all of the next; ``dst_ptrs``: a tensor a kind."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, src in enumerate(src_ptrs):
        kind, layer = divmod(index, layers)
        dst_ptrs[kind][dst_indices // page_size, layer, dst_indices % page_size] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """From the host: places ``src_indices`` [n] of one layer to tokens ``dst_indices`` [n]; a tensor a kind in both."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]
