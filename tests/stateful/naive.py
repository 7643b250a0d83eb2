"""The naive model of the stateful test: every token of every request is kept, every state is recomputed from its
tokens.

No pools, no windows, no kernels: float64, one head at a time, straight from the equations in architecture terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """A model small enough to recompute at every step."""

    layers: int = 2
    heads: int = 1
    value_heads: int = 2
    key_dim: int = 4
    value_dim: int = 3
    taps: int = 4

    @property
    def dim(self) -> int:
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim


@dataclass
class Weights:
    """Per layer: convolution weight [layers, dim, taps], A_log and dt_bias [layers, value_heads]."""

    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def random(cls, sizes: Sizes, generator: torch.Generator) -> Weights:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return cls(
            draw(sizes.layers, sizes.dim, sizes.taps),
            draw(sizes.layers, sizes.value_heads) - 1,
            draw(sizes.layers, sizes.value_heads),
        )


@dataclass(frozen=True)
class Token:
    """One token's inputs in every layer: x [layers, dim], a and b [layers, value_heads]."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def random(cls, sizes: Sizes, generator: torch.Generator) -> Token:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return cls(
            draw(sizes.layers, sizes.dim), draw(sizes.layers, sizes.value_heads), draw(sizes.layers, sizes.value_heads)
        )


@dataclass(frozen=True)
class State:
    """The state after some tokens: temporal [layers, HV, V, K], conv [layers, dim, taps - 1], all float64."""

    temporal: torch.Tensor
    conv: torch.Tensor

    @classmethod
    def zero(cls, sizes: Sizes) -> State:
        return cls(
            torch.zeros(sizes.layers, sizes.value_heads, sizes.value_dim, sizes.key_dim, dtype=torch.float64),
            torch.zeros(sizes.layers, sizes.dim, sizes.taps - 1, dtype=torch.float64),
        )


def step(sizes: Sizes, weights: Weights, state: State, token: Token) -> tuple[State, torch.Tensor]:
    """Advance by one token; returns the new state and the outputs [layers, HV, V] (scale 1)."""
    temporal, outputs = state.temporal.clone(), []
    taps = torch.cat([state.conv, token.x.double()[..., None]], dim=-1)
    keys = sizes.heads * sizes.key_dim
    for layer in range(sizes.layers):
        y = torch.nn.functional.silu((taps[layer] * weights.conv[layer].double()).sum(-1))
        q = y[:keys].view(sizes.heads, sizes.key_dim)
        k = y[keys : 2 * keys].view(sizes.heads, sizes.key_dim)
        v = y[2 * keys :].view(sizes.value_heads, sizes.value_dim)
        decay = torch.nn.functional.softplus(token.a[layer].double() + weights.dt_bias[layer].double())
        g = -weights.A_log[layer].double().exp() * decay
        beta = token.b[layer].double().sigmoid()
        rows = []
        for head in range(sizes.value_heads):
            group = head * sizes.heads // sizes.value_heads
            unit_k = k[group] / (k[group].square().sum() + 1e-6).sqrt()
            unit_q = q[group] / (q[group].square().sum() + 1e-6).sqrt()
            s = temporal[layer, head] * g[head].exp()
            s = s + torch.outer(beta[head] * (v[head] - s @ unit_k), unit_k)
            temporal[layer, head] = s
            rows.append(s @ unit_q)
        outputs.append(torch.stack(rows))
    return State(temporal, taps[..., 1:]), torch.stack(outputs)
