"""Experts without a gate, and the product that routes to them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp.cpu.expert_ops import mm, squared_relu_experts, with_squared_relu

from ..processes import sglang  # noqa: F401


def _layer_and_choice() -> tuple[SimpleNamespace, torch.Tensor, SimpleNamespace]:
    up, down, x = (torch.randn(*size, dtype=torch.float64) for size in ((4, 8, 6), (4, 6, 8), (9, 6)))
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    ids[2, 1] = ids[5, 0] = -1
    chosen = SimpleNamespace(topk_ids=ids, topk_weights=torch.rand(9, 2, dtype=torch.float64))
    return SimpleNamespace(w13_weight=up, w2_weight=down), x, chosen


def test_each_token_hears_the_experts_it_chose():
    """Against a loop over tokens; experts of other ranks add nothing."""
    layer, x, chosen = _layer_and_choice()
    wanted = torch.zeros_like(x)
    for token in range(9):
        for weight, expert in zip(chosen.topk_weights[token], chosen.topk_ids[token].tolist(), strict=True):
            if expert >= 0:
                inner = torch.relu(layer.w13_weight[expert] @ x[token]) ** 2
                wanted[token] += 1.5 * weight * (layer.w2_weight[expert] @ inner)
    torch.testing.assert_close(squared_relu_experts(layer, x, chosen, 1.5), wanted)


def test_sglangs_method_takes_them_and_keeps_its_own(sglang):  # noqa: F811
    layer, x, chosen = _layer_and_choice()
    dispatched = SimpleNamespace(hidden_states=x, topk_output=chosen)
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(activation="relu2", routed_scaling_factor=None))
    forward = with_squared_relu(lambda *_: "its own")
    assert torch.equal(forward(method, layer, dispatched).hidden_states, squared_relu_experts(layer, x, chosen, 1.0))
    method.moe_runner_config.activation = "silu"
    assert forward(method, layer, dispatched) == "its own"


@pytest.mark.parametrize("wider", [torch.float32, None])
def test_a_product_may_be_wider_than_its_factors(wider):
    left, right = torch.randn(3, 5).bfloat16(), torch.randn(5, 2).bfloat16()
    found = mm(left, right, out_dtype=wider)
    assert found.dtype == (wider or torch.bfloat16)
    torch.testing.assert_close(found, left.to(found.dtype) @ right.to(found.dtype))
