"""Copies between the tokens of one rank and those of all, and experts of several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from sglang_mamba_mtp.cpu.parallel_ops import memcpy_cpu, own_experts_only

from ..processes import sglang  # noqa: F401


@pytest.mark.parametrize(("first", "rows"), [(0, 3), (2, 3), (4, 0)])
def test_rows_go_there_and_back(first, rows):
    """Nothing beside the rows asked for is written."""
    mine, all_ranks = torch.randn(5, 2), torch.zeros(7, 2)
    memcpy_cpu(all_ranks, mine, 0, torch.tensor([first]), torch.tensor([rows]), False)
    assert torch.equal(all_ranks[first : first + rows], mine[:rows])
    assert all_ranks.count_nonzero() == 2 * rows
    back = torch.zeros(5, 2)
    memcpy_cpu(back, all_ranks, 0, torch.tensor([first]), torch.tensor([rows]), True)
    assert torch.equal(back[:rows], mine[:rows]) and back.count_nonzero() == 2 * rows


class Chosen(NamedTuple):
    """SGLang's `StandardTopKOutput`."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None


def test_what_two_ranks_experts_say_adds_up_to_what_all_say(sglang, monkeypatch):  # noqa: F811
    """SGLang's own function with all experts, and with each half of them; it fails where experts are elsewhere."""
    from sglang.srt.layers.moe import fused_moe_native

    # 0.5.17's own wants a server's arguments
    monkeypatch.setattr(fused_moe_native, "SiluAndMul", lambda: lambda both: F.silu(both[:, :8]) * both[:, 8:])
    forward = fused_moe_native.moe_forward_native
    stock = getattr(forward, "__wrapped__", forward)
    config = SimpleNamespace(
        apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None
    )
    up, down, x = torch.randn(4, 2 * 8, 6), torch.randn(4, 6, 8), torch.randn(9, 6)
    weights, ids = torch.rand(9, 2), torch.stack([torch.randperm(4)[:2] for _ in range(9)])

    def layer(experts: slice) -> SimpleNamespace:
        return SimpleNamespace(num_experts=4, w13_weight=up[experts], w2_weight=down[experts])

    whole = stock(layer(slice(0, 4)), x, Chosen(weights, ids, None), config)
    parts = []
    for rank in range(2):
        mine = torch.where(ids // 2 == rank, ids - 2 * rank, -1)
        chosen = Chosen(weights, mine, None)
        with pytest.raises(RuntimeError):
            stock(layer(slice(2 * rank, 2 * rank + 2)), x, chosen, config)
        parts.append(own_experts_only(stock)(layer(slice(2 * rank, 2 * rank + 2)), x, chosen, config))
    torch.testing.assert_close(parts[0] + parts[1], whole)
