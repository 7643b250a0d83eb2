"""Layers both models share: norms, short convolution, attention (with draft-step memory), and initialisation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm over the last dim in float32; ``gemma`` weights are stored as w - 1, as Qwen3-Next's are."""

    def __init__(self, size: int, *, eps: float = 1e-6, gemma: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if gemma else torch.ones(size))
        self.eps, self.gemma = eps, gemma

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight if self.gemma else self.weight
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.eps).to(x.dtype)


class ShortConv(nn.Module):
    """Causal depthwise convolution and SiLU: [B, S, D] -> [B, S, D]; weight [D, 1, width] as in the checkpoints."""

    def __init__(self, size: int, *, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1], self.weight.shape[-1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        weight = self.weight.to(x.dtype)
        out = sum(padded[:, tap : tap + length] * weight[:, 0, tap] for tap in range(width))
        return F.silu(out if self.bias is None else out + self.bias.to(x.dtype))


def rope(x: Tensor, *, rotary_dim: int, theta: float) -> Tensor:
    """Rotate the first ``rotary_dim`` of the head dim, neox style, at positions 0..S-1. x: [B, H, S, D]."""
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, device=x.device).float() / rotary_dim)
    angle = torch.arange(x.shape[2], device=x.device).float()[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = x.float().split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def draft_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Which keys the rows of draft step ``step`` see: bool [S, (step + 1) * S].

    Row i holds the embedding of token i+1. At step s its own hidden state comes from step s-1's row i-1, so it sees
    step 0's keys (made from the target's hidden states) up to row i-s, and one key of each later step t at row i-s+t.
    """
    row = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    blocks = [key <= row - step] + [key == row - step + t for t in range(1, step + 1)]
    return torch.cat(blocks, dim=1)


class Attention(nn.Module):
    """Grouped-query causal attention: [B, S, hidden] -> [B, S, hidden].

    gated: an output gate and q/k norms, with RoPE on part of the head (Qwen3-Next); else plain, without positions
    (Nemotron-H).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        gated: bool,
        rotary_dim: int = 0,
        theta: float = 1e4,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.gated, self.rotary_dim, self.theta = gated, rotary_dim, theta
        self.q_proj = nn.Linear(hidden, heads * head_dim * (2 if gated else 1), bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        if gated:
            self.q_norm = RMSNorm(head_dim, gemma=True)
            self.k_norm = RMSNorm(head_dim, gemma=True)

    def forward(self, x: Tensor, memory: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """memory: keys and values [B, heads, S, D] of the earlier draft steps; this step's are appended to it."""
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        gate = None
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.rotary_dim:
            q, k = (rope(t, rotary_dim=self.rotary_dim, theta=self.theta) for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        if memory:
            mask = draft_mask(x.shape[1], len(memory), x.device)
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*memory, (k, v), strict=True))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if memory is not None:
            memory.append((k, v))
        out = out.transpose(1, 2)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(2))


def initialise(model: nn.Module, depth: int) -> None:
    """Normal weights of std fan_in^-0.5; those that write into the residual stream are divided by sqrt(2 depth)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "conv1d" in name:
            continue
        std = parameter.shape[-1] ** -0.5
        if "embed" in name:
            std = 0.1
        elif name.startswith("lm_head"):
            std = 0.02
        elif any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            std /= math.sqrt(2 * depth)
        nn.init.normal_(parameter, std=std)


def log_uniform_dt_bias(heads: int, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """Biases whose softplus is log-uniform in [low, high], as Mamba2 starts: [heads]."""
    dt = torch.exp(torch.rand(heads) * (math.log(high) - math.log(low)) + math.log(low))
    return dt + torch.log(-torch.expm1(-dt))
