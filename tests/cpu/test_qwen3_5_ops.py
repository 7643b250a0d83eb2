"""Qwen3.5's small ops on CPU against loops over heads in float64."""

from __future__ import annotations

import pytest
import torch

from sglang_mamba_mtp.cpu import qwen3_5_ops

T, HEADS, KV_HEADS, DIM = 5, 4, 2, 6


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean() + eps).sqrt() * (1 + weight.double())


@pytest.mark.parametrize("inplace", [True, False])
def test_sigmoid_mul(inplace: bool):
    x, gate = rand(T, HEADS * DIM), rand(T, HEADS, 2 * DIM)[..., DIM:]  # a gate between queries: strided
    before = x.clone()
    out = qwen3_5_ops.fused_sigmoid_mul_cpu(x, gate, inplace)
    torch.testing.assert_close(out, before * gate.reshape(T, -1).sigmoid())
    assert torch.equal(x, out if inplace else before)


def test_norms_and_gate():
    """Every head on its own, the query before its gate; results can be viewed as [T, heads * DIM]."""
    projected, q_weight, k_weight = rand(T, (2 * HEADS + KV_HEADS) * DIM), rand(DIM), rand(DIM) + 1
    q_gate, k = projected.split([2 * HEADS * DIM, KV_HEADS * DIM], dim=-1)
    q, key, gate = (
        x.view(T, -1)
        for x in qwen3_5_ops.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, 1e-3, DIM, HEADS)
    )
    for t in range(T):
        for h in range(HEADS):
            own, mine = q_gate[t, 2 * h * DIM : 2 * (h + 1) * DIM], slice(h * DIM, (h + 1) * DIM)
            torch.testing.assert_close(q[t, mine].double(), normed(own[:DIM], q_weight, 1e-3), rtol=1e-5, atol=1e-6)
            assert torch.equal(gate[t, mine], own[DIM:])
        for h in range(KV_HEADS):
            mine = slice(h * DIM, (h + 1) * DIM)
            torch.testing.assert_close(key[t, mine].double(), normed(k[t, mine], k_weight, 1e-3), rtol=1e-5, atol=1e-6)
    again = qwen3_5_ops.fused_qk_gemma_rmsnorm_cpu(
        q_gate.view(T, HEADS, 2, DIM)[:, :, 0].reshape(T, -1), k, q_weight, k_weight, 1e-3, DIM
    )
    assert torch.equal(again[0].view(T, -1), q) and torch.equal(again[1].view(T, -1), key)


def test_projections_are_split_in_order():
    """All queries, keys, values, gates; all b, all a. Only the gates are per head."""
    value_heads, value_dim = 6, 3
    sizes = {"q": KV_HEADS * DIM, "k": KV_HEADS * DIM, "v": value_heads * value_dim, "z": value_heads * value_dim}
    parts = {name: rand(T, size) + i for i, (name, size) in enumerate(sizes.items())}
    b, a = rand(T, value_heads), rand(T, value_heads) + 9
    qkv, z, b_out, a_out = qwen3_5_ops.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat(list(parts.values()), -1), torch.cat([b, a], -1), KV_HEADS, value_heads, DIM, value_dim
    )
    assert torch.equal(qkv, torch.cat([parts["q"], parts["k"], parts["v"]], -1)) and qkv.is_contiguous()
    assert torch.equal(z, parts["z"].view(T, value_heads, value_dim)) and z.is_contiguous()
    assert torch.equal(b_out, b) and torch.equal(a_out, a)
