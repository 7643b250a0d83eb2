"""What Qwen3.5's layers do around attention and GDN, on CPU: splits of their projections, norms, gates.

Norms are Gemma's, `rms(x) * (1 + weight)` over the head dimension (arXiv:2403.08295), in float32.
"""

from __future__ import annotations

import torch


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    xf = x.float()
    normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """`x * sigmoid(gate)`; x `[T, D]`, gate of as many elements, any strides. ``inplace`` writes into x."""
    product = x.float() * gate.reshape(x.shape).float().sigmoid()
    return x.copy_(product) if inplace else product.to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm every head of q `[T, heads * head_dim]` and k `[T, kv_heads * head_dim]`.

    Returns
        q `[T * heads, head_dim]`, k `[T * kv_heads, head_dim]`.
    """
    return (
        _gemma_norm(q.reshape(-1, head_dim), q_weight, eps),
        _gemma_norm(k.reshape(-1, head_dim), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where each head of ``q_gate`` `[T, heads * 2 * head_dim]` is its query, then its output gate.

    Returns
        q `[T * heads, head_dim]`, k `[T * kv_heads, head_dim]`, gate `[T * heads, head_dim]`, all contiguous.
    """
    q, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split GDN's projections `[T, q k v z]` and `[T, b a]` (all heads of one input, then of the next).

    Returns
        qkv `[T, 2 H K + HV V]`, z `[T, HV, V]`, b and a `[T, HV]`, all contiguous.
    """
    value_dim = num_v_heads * head_v_dim
    qkv, z = mixed_qkvz.split([2 * num_k_heads * head_k_dim + value_dim, value_dim], dim=-1)
    b, a = mixed_ba.split([num_v_heads, num_v_heads], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_v_heads, head_v_dim).contiguous(), b.contiguous(), a.contiguous()
