"""Tree links shared by the conv and SSM ops and by acceptance.

A draft tree reaches the kernels as two link tensors (`retrieve_next_token`: first child, `retrieve_next_sibling`: next
child of the same parent, both `[bs, N]`, -1 for none). The recurrences need parents. Nodes are in topological order,
node 0 is the root; its parent is the committed state (-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def drafts_after(node: int, next_token: Sequence[int], next_sibling: Sequence[int]) -> Iterator[int]:
    """The nodes of ``node``'s drafts by its tree's links, in turn.

    A link to no later node leads nowhere: in a tree none does, and what led back could be followed for ever. One past
    the tree is an IndexError when it is followed.
    """
    before, following = node, next_token[node]
    while following > before:
        yield following
        before, following = following, next_sibling[following]


def parents_from_links(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Parent of every node.

    Args
        next_token: `[bs, N]` integer, first child or -1.
        next_sibling: `[bs, N]` integer, next sibling or -1.

    Returns
        `[bs, N]` int64; -1 for the root and for nodes no link leads to.
    """
    bs, n = next_token.shape
    parents = torch.full((bs, n), -1, dtype=torch.int64)
    rows = torch.arange(bs)
    # A link only ever leads to a larger index, so one ascending pass sees each parent before its children.
    for node in range(n):
        child = next_token[:, node].to(torch.int64)
        ok = child > node
        parents[rows[ok], child[ok]] = node
        sibling = next_sibling[:, node].to(torch.int64)
        ok = sibling > node
        parents[rows[ok], sibling[ok]] = parents[ok, node]
    return parents


def chain_parents(bs: int, n: int) -> torch.Tensor:
    """`[bs, N]` int64 parents of a chain: -1, 0, 1, ..."""
    return torch.arange(-1, n - 1).expand(bs, n)
