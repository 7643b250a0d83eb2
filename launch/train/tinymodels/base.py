"""What both models look like to the training loop, the evaluation and the export."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class TinyModel(nn.Module, ABC):
    """A trunk, its head, and an MTP (NEXTN) head that drafts on its own hidden states.

    Parameter names are the checkpoint's names, but for fused experts (see checkpoint_tensors).
    """

    name: str
    lm_head: nn.Linear

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """int [B, S] -> [B, S, hidden]."""

    @abstractmethod
    def trunk(self, tokens: Tensor) -> Tensor:
        """int [B, S] -> the hidden states after the final norm [B, S, hidden], as SGLang hands them to the MTP head."""

    @abstractmethod
    def draft(self, embeds: Tensor, hidden: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One pass of the MTP head: embeddings of tokens i+1, hidden states of rows i -> its normed hidden states."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json's content, without token ids."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Tensors under the checkpoint's names, in the training dtype."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def forward(self, tokens: Tensor, steps: int) -> list[Tensor]:
        """Hidden states to apply lm_head to. tokens: int [B, S + 1] -> 1 + steps tensors [B, S, hidden].

        The first predicts token i+1 at row i; draft step s (from 0) predicts token i+2 at row i from the target's
        hidden state of row i-s and its own of the s rows since. Rows i < s of step s mean nothing.
        """
        hidden = self.trunk(tokens[:, :-1])
        outputs, memory = [hidden], []
        embeds = self.embed(tokens[:, 1:])
        for step in range(steps):
            if step:
                hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
            hidden = self.draft(embeds, hidden, memory)
            outputs.append(hidden)
        return outputs
