"""The draft tree that is a chain: known without SGLang's links. No triton in this file."""

from __future__ import annotations

import torch

from .operands import check_nodes


def chain_tree(nodes: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents [nodes] int32 and ancestors [nodes] int64 of a chain, as `tree.build_tree` gives them for a row.

    Their beginnings are the shorter chains', and one row does for a whole batch (with a row stride of 0).
    Raises ValueError where there are more nodes than an ancestor mask has bits.
    """
    check_nodes(nodes)
    node = torch.arange(nodes, dtype=torch.int64, device=device)
    return (node - 1).to(torch.int32), (torch.ones_like(node) << node) - 1
