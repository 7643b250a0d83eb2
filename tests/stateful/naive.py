"""The naive model of the stateful test: every token of every request is kept, every state is recomputed from its
tokens.

No pools, no windows, no kernels: float64, one token at a time, straight from the equations in architecture terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu, softplus


@dataclass(frozen=True)
class Sizes:
    """A model small enough to recompute at every step. Mamba2 calls groups, heads, dstate and headdim what GDN calls
    heads, value_heads, key_dim and value_dim."""

    layers: int = 2
    heads: int = 1
    value_heads: int = 2
    key_dim: int = 4
    value_dim: int = 3
    taps: int = 4

    @property
    def keys(self) -> int:
        return self.heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def dim(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values


Given = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Token:
    """One token's inputs in every layer: x [layers, dim], and what the family takes a head [layers, value_heads]."""

    x: torch.Tensor
    gates: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class State:
    """The state after some tokens, float64: temporal [layers, value_heads, value_dim, key_dim], conv [layers, dim,
    taps - 1]."""

    temporal: torch.Tensor
    conv: torch.Tensor

    @classmethod
    def zero(cls, sizes: Sizes) -> State:
        return cls(
            torch.zeros(sizes.layers, sizes.value_heads, sizes.value_dim, sizes.key_dim, dtype=torch.float64),
            torch.zeros(sizes.layers, sizes.dim, sizes.taps - 1, dtype=torch.float64),
        )


class Model(ABC):
    """One family's layers: a convolution weight [layers, dim, taps], and parameters [layers, value_heads]."""

    family: str
    gates: tuple[str, ...]

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        self.sizes, self._generator = sizes, generator
        self.conv = self.draw(sizes.dim, sizes.taps)

    def draw(self, *shape: int) -> torch.Tensor:
        """Normal numbers for every layer, [layers, *shape] float32."""
        return torch.randn(self.sizes.layers, *shape, generator=self._generator)

    def token(self) -> Token:
        """A random token."""
        return Token(self.draw(self.sizes.dim), {name: self.draw(self.sizes.value_heads) for name in self.gates})

    def step(self, state: State, token: Token) -> tuple[State, torch.Tensor]:
        """Advance by one token; returns the new state and the outputs [layers, value_heads, value_dim]."""
        taps = torch.cat([state.conv, token.x.double()[..., None]], dim=-1)
        y = silu((taps * self.conv.double()).sum(-1))
        gates = {name: gate.double() for name, gate in token.gates.items()}
        temporal, outputs = self.heads_step(state.temporal, y, gates)
        return State(temporal, taps[..., 1:]), outputs

    @abstractmethod
    def heads_step(
        self, states: torch.Tensor, y: torch.Tensor, gates: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All heads' states [layers, value_heads, value_dim, key_dim] and outputs [layers, value_heads, value_dim]
        after a token; y [layers, dim] is convolved, gates [layers, value_heads]."""

    @abstractmethod
    def score(self, store: Any, layer: int, verify: Any, given: Given, gates: Given) -> Any:
        """What the family's backend does after the convolution: given by the store, gates [tokens, value_heads]."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, tuple[int, int]]:
        """What the convolved channels are, in order: heads and dimensions by name."""

    def _parts(self, y: torch.Tensor) -> list[torch.Tensor]:
        """[layers, value_heads, dimensions] each, of one token's y [layers, dim]: heads that share one have it each."""
        pieces = y.split([heads * dims for heads, dims in self.parts.values()], dim=-1)
        parts = [piece.unflatten(-1, shape) for piece, shape in zip(pieces, self.parts.values(), strict=True)]
        return [part.repeat_interleave(self.sizes.value_heads // part.shape[1], dim=1) for part in parts]


def _times(states: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """[..., value_dim] of states [..., value_dim, key_dim] and vectors [..., key_dim]."""
    return (states * vectors[..., None, :]).sum(-1)


class Gdn(Model):
    """q | k | v convolved; queries and keys are normalised, the scale is 1."""

    family, gates = "gdn", ("a", "b")

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__(sizes, generator)
        self.A_log, self.dt_bias = self.draw(sizes.value_heads) - 1, self.draw(sizes.value_heads)

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        keys = (self.sizes.heads, self.sizes.key_dim)
        return {"q": keys, "k": keys, "v": (self.sizes.value_heads, self.sizes.value_dim)}

    def heads_step(
        self, states: torch.Tensor, y: torch.Tensor, gates: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self._parts(y)
        unit_q, unit_k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        g = -self.A_log.double().exp() * softplus(gates["a"] + self.dt_bias.double())
        states = states * g.exp()[..., None, None]
        delta = gates["b"].sigmoid()[..., None] * (v - _times(states, unit_k))
        states = states + delta[..., None] * unit_k[..., None, :]
        return states, _times(states, unit_q)

    def score(self, store: Any, layer: int, verify: Any, given: Given, gates: Given) -> Any:
        parameters = {"A_log": self.A_log[layer], "dt_bias": self.dt_bias[layer], "scale": 1.0}
        return store.score(layer, verify, **given, **gates, **parameters)


class Mamba2(Model):
    """x | B | C convolved; the step size is softplus(dt + dt_bias)."""

    family, gates = "mamba2", ("dt",)

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__(sizes, generator)
        self.A = -(self.draw(sizes.value_heads) - 1).exp()
        self.dt_bias, self.D = self.draw(sizes.value_heads), self.draw(sizes.value_heads)

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        groups = (self.sizes.heads, self.sizes.key_dim)
        return {"x": (self.sizes.value_heads, self.sizes.value_dim), "B": groups, "C": groups}

    def heads_step(
        self, states: torch.Tensor, y: torch.Tensor, gates: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, B, C = self._parts(y)
        dt = softplus(gates["dt"] + self.dt_bias.double())[..., None]
        decay = (self.A.double()[..., None] * dt).exp()
        states = states * decay[..., None] + (dt * x)[..., None] * B[..., None, :]
        return states, _times(states, C) + self.D.double()[..., None] * x

    def score(self, store: Any, layer: int, verify: Any, given: Given, gates: Given) -> Any:
        parameters = {"A": self.A[layer], "D": self.D[layer], "dt_bias": self.dt_bias[layer]}
        return store.score(layer, verify, **given, **gates, **parameters, dt_softplus=True)


MODELS: dict[str, type[Model]] = {model.family: model for model in (Gdn, Mamba2)}
