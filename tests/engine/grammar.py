"""A grammar for constrained requests that needs no tokenizer: token i congruent to i modulo 3, n tokens, then the end.

It goes through SGLang's own grammar manager, masks and tree traversal, as a backend under a request's ``regex``.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject

PERIOD = 3


class CountingGrammar(BaseGrammarObject):
    """Accepts ``length`` tokens, token i congruent to i modulo PERIOD, and then ``end``, which terminates it."""

    def __init__(self, length: int, end: int):
        super().__init__()
        self.length = length
        self.end = end
        self.seen = 0

    def _allowed(self, tokens):
        if self.seen >= self.length:
            return (tokens == self.end) if not self.is_terminated() else (tokens != tokens)
        return (tokens % PERIOD == self.seen % PERIOD) & (tokens != self.end)

    def accept_token(self, token: int) -> None:
        if not self._allowed(torch.tensor(token)):
            raise ValueError(f"token {token} at position {self.seen} of a grammar of length {self.length}")
        self.seen += 1

    def rollback(self, k: int) -> None:
        self.seen -= k

    def is_terminated(self) -> bool:
        return self.seen > self.length

    def copy(self) -> CountingGrammar:
        return CountingGrammar(self.length, self.end)

    # Masks are int32 [rows, ceil(vocab / 32)], a set bit for each token allowed.

    @staticmethod
    def allocate_vocab_mask(vocab_size: int, batch_size: int, device) -> torch.Tensor:
        return torch.full((batch_size, (vocab_size + 31) // 32), -1, dtype=torch.int32)

    @staticmethod
    def reset_vocab_mask(vocab_mask: torch.Tensor) -> None:
        vocab_mask.fill_(-1)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        words = vocab_mask.shape[1]
        bits = (self._allowed(torch.arange(words * 32)).view(words, 32).long() << torch.arange(32)).sum(1)
        vocab_mask[idx] = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)

    @staticmethod
    def move_vocab_mask(vocab_mask: torch.Tensor, device) -> torch.Tensor:
        return vocab_mask.to(device)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        bits = (vocab_mask.long().unsqueeze(-1) >> torch.arange(32, device=vocab_mask.device)) & 1
        logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


class CountingBackend(BaseGrammarBackend):
    """The key string of a request is the length of its answer."""

    def __init__(self, end: int):
        super().__init__()
        self.end = end

    def get_cached_or_future_value(self, key, require_reasoning):
        ready: Future = Future()
        ready.set_result(CountingGrammar(int(key[1]), self.end))
        return ready, False
