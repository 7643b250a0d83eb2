"""Experts with a squared ReLU and no gate, as Nemotron-H has them, in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

SQUARED_RELU = "relu2"


def mm(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.mm`, with ``out_dtype`` on a CPU too."""
    if out_dtype is None:
        return torch.mm(left, right)
    return torch.mm(left.to(out_dtype), right.to(out_dtype))


def squared_relu_experts(layer: Any, x: torch.Tensor, chosen: Any, scale: float) -> torch.Tensor:
    """What the chosen experts make of x `[T, hidden]`, times ``scale``; those of other ranks (id -1) add nothing.

    layer: its w13_weight is `[experts, inner, hidden]`, w2_weight `[experts, hidden, inner]`. chosen: topk_ids and
    topk_weights, `[T, choices]`.
    """
    total = torch.zeros_like(x)
    for expert in chosen.topk_ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = (chosen.topk_ids == expert).nonzero(as_tuple=True)
        inner = torch.relu(x[token] @ layer.w13_weight[expert].T).square()
        weight = (chosen.topk_weights[token, choice] * scale).to(x.dtype)
        total.index_add_(0, token, weight[:, None] * (inner @ layer.w2_weight[expert].T))
    return total


def with_squared_relu(forward_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's ``UnquantizedFusedMoEMethod.forward_cpu``, which knows experts with a gate only, and the above. The
    scale that its kernels on a GPU take along is taken here."""

    @functools.wraps(forward_cpu)
    def forward(self: Any, layer: Any, dispatch_output: Any) -> Any:
        config = self.moe_runner_config
        if config.activation != SQUARED_RELU:
            return forward_cpu(self, layer, dispatch_output)
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        scale = config.routed_scaling_factor or 1.0
        found = squared_relu_experts(layer, dispatch_output.hidden_states, dispatch_output.topk_output, scale)
        return StandardCombineInput(hidden_states=found)

    return forward
