"""Log-probabilities that a request was told, and how far two engines may differ in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BOUND = 1e-4
"""Nats, in float32: clean runs show a few 1e-6. SGLang allows 0.05 to 0.5, in 16 bits."""


def of_prompt(req: Any) -> list[float]:
    """Of the prompt's tokens that it asked for, but the first of a text, which has none."""
    return [value for value in req.logprob.input_token_logprobs_val or () if value is not None]


def of_answer(req: Any) -> list[float]:
    """Of every token that it has said; a scheduler keeps those of drafts past the end as well."""
    return list(req.logprob.output_token_logprobs_val or ())[: len(req.output_ids_through_stop)]


def difference(got: Sequence[float], want: Sequence[float]) -> float:
    """The largest difference, infinite where one is missing."""
    if len(got) != len(want):
        return float("inf")
    return max((abs(a - b) for a, b in zip(got, want, strict=True)), default=0.0)
