"""What the checkpoints of the test models are made of: named random tensors, and the folder they are written to.

The weights are scaled so that a test bites. A random model alone would either repeat one token or never agree with
its MTP layer, so the output head favours `next = PERM[token]` with strength `markov`: the layers' contributions
(recurrent state included) override it often enough that greedy text depends on the whole prompt, and the MTP layer,
which sees the same embedding, agrees often enough that drafts are accepted in runs of varying length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 128
HIDDEN = 64
MARKOV = 0.6


class Weights:
    """Named float32 tensors from one seeded generator; order of calls is the format."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int, std: float) -> torch.Tensor:
        self.tensors[name] = torch.randn(*shape, generator=self.generator) * std
        return self.tensors[name]

    def linear(self, name: str, out_features: int, in_features: int, gain: float = 1.0) -> None:
        self.normal(name, out_features, in_features, std=gain * in_features**-0.5)

    def near(self, name: str, value: float, *shape: int, spread: float = 0.1) -> None:
        self.normal(name, *shape, std=spread)
        self.tensors[name] += value

    def uniform(self, name: str, low: float, high: float, *shape: int) -> None:
        self.tensors[name] = torch.rand(*shape, generator=self.generator) * (high - low) + low

    def embedding_and_head(self, embedding: str, head: str, markov: float) -> None:
        """`head` row PERM[t] leans towards the embedding of t."""
        embed = self.normal(embedding, VOCAB, HIDDEN, std=1.0)
        lm_head = torch.randn(VOCAB, HIDDEN, generator=self.generator)
        permutation = torch.randperm(VOCAB, generator=self.generator)
        lm_head[permutation] += markov * embed
        lm_head[VOCAB - 1] = 0  # the end of text token: its logit 0 never is the largest
        self.tensors[head] = lm_head * HIDDEN**-0.5

    def mix(self, name: str, keep: float, gain: float) -> None:
        """MTP's input projection `[H, 2H]`: the embedding half nearly the identity, the hidden half random."""
        noise = torch.randn(HIDDEN, HIDDEN, generator=self.generator) * gain * HIDDEN**-0.5
        self.tensors[name] = torch.cat([torch.eye(HIDDEN) * keep, noise], dim=1)

    def save(self, folder: Path, config: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        generation = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder


def special_tokens() -> dict[str, Any]:
    """One special token for all purposes, which the models never predict: no test stops by accident."""
    return {"bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 1}
