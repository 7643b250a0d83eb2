"""Draft trees: from SGLang's child and sibling links to parents and ancestor masks, once per forward.

`retrieve_next_token[b, i]` is the first child of node i, `retrieve_next_sibling[b, i]` the next child of i's parent,
-1 for none. Nodes are in topological order (parent < child, and siblings in rising order), so one pass over the
nodes settles every parent before it is read. A node no link leads to hangs on the root, as in SGLang's conv kernel.

One program per row, the N nodes in the lanes of one warp. parents [rows, N] int32, ancestors [rows, N] int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import INDICES, Arg, check
from .dependent import has_dependent_launch, wait_then_let_go
from .grid import launch_grid
from .operands import check_nodes


@triton.jit
def _pick(values, lane, node):
    """Element `node` of a lane vector, as a scalar."""
    return tl.sum(tl.where(lane == node, values, 0), axis=0)


@triton.jit
def _build_tree_kernel(
    parents,
    ancestors,
    next_token,
    next_sibling,
    stride_next_token,
    stride_next_sibling,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_then_let_go(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    inside = lane < N
    child_link = tl.load(next_token + row * stride_next_token + lane, mask=inside, other=-1).to(tl.int32)
    sibling_link = tl.load(next_sibling + row * stride_next_sibling + lane, mask=inside, other=-1).to(tl.int32)
    parent = tl.where(lane == 0, -1, 0)
    for node in range(N):
        # links that lead backwards or past the tree come from stale rows
        child = _pick(child_link, lane, node)
        parent = tl.where((lane == child) & (lane > node), node, parent)
        above = _pick(parent, lane, node)
        sibling = _pick(sibling_link, lane, node)
        parent = tl.where((lane == sibling) & (lane > node) & (above >= 0), above, parent)
    mask = tl.zeros((BLOCK_N,), dtype=tl.int64)
    for node in range(N):
        own = _pick(mask, lane, node) | (tl.full((), 1, tl.int64) << node)
        mask = tl.where((parent == node) & (lane > node), own, mask)
    tl.store(parents + row * N + lane, parent.to(tl.int32), mask=inside)
    tl.store(ancestors + row * N + lane, mask, mask=inside)


def build_tree(
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch: int,
) -> None:
    """Fill the first `batch` rows of `parents` and `ancestors`; rows beyond are left alone.

    parents    [>=batch, N] int32, contiguous, N <= 64: written, each node's parent, -1 at the root.
    ancestors  [>=batch, N] int64, contiguous: written, bit j of node i set iff j is a strict ancestor of i.
    retrieve_next_token, retrieve_next_sibling
               [>=batch, N] int32 or int64, any row stride: read, SGLang's links, -1 for none. Links that do not lead to
               a later node are ignored, so stale rows give some tree, never an access out of bounds.
    batch      rows to fill.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    nodes = parents.shape[1]
    check_nodes(nodes)
    check(
        {"batch": batch},
        parents=Arg(parents, ">=batch N", torch.int32, contiguous=2),
        ancestors=Arg(ancestors, ">=batch N", torch.int64, contiguous=2),
        retrieve_next_token=Arg(retrieve_next_token, ">=batch N", INDICES),
        retrieve_next_sibling=Arg(retrieve_next_sibling, ">=batch N", INDICES),
    )
    if batch == 0:
        return
    overlap = has_dependent_launch(parents.device)
    _build_tree_kernel[launch_grid(batch)](
        parents,
        ancestors,
        retrieve_next_token,
        retrieve_next_sibling,
        retrieve_next_token.stride(0),
        retrieve_next_sibling.stride(0),
        N=nodes,
        BLOCK_N=triton.next_power_of_2(nodes),
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
