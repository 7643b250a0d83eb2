"""Draws that depend on nothing but the request, its seed and how many tokens it has, as SGLang's deterministic
inference makes them. Which batches it shared, and what others drew before, no longer matters: two engines that compute
the same probabilities draw the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from . import logprobs
from .spec import Result

SEED = 42
"""SGLang's, of a request that names none."""


def seed_requests() -> None:
    """Every batch of this process is sampled, and its drafts are verified, with seeds."""
    from sglang.kernels.ops.sampling import murmur_hash
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def seeded(cls: type, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        info.sampling_seed = torch.full((len(batch.reqs),), SEED, dtype=torch.int64, device=batch.device)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(seeded)
    if not torch.cuda.is_available():  # SGLang's hash is a kernel
        sampler.murmur_hash32 = murmur_hash.murmur_hash32 = _hash


def _hash(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Numbers below 2**32 [n, m] that look random, of ``seed`` and ``positions`` [n] and ``columns`` [m]."""
    rows = seed.to(torch.int64) * 0x9E3779B1 + positions.to(torch.int64) * 0x85EBCA6B
    mixed = (rows[:, None] + columns.to(torch.int64) * 0xC2B2AE35) & 0xFFFFFFFF
    for shift in (16, 13, 16):
        mixed = ((mixed ^ (mixed >> shift)) * 0x45D9F3B) & 0xFFFFFFFF
    return mixed


def drawn_otherwise(result: Result, wanted: Result) -> list[str]:
    """The requests that have other tokens than in the wanted run, those at a temperature included."""
    pairs = {key: (result.outcomes[key].tokens, want.tokens) for key, want in wanted.outcomes.items()}
    return [key for key, (got, want) in pairs.items() if got != want]


def told_otherwise(result: Result, wanted: Result) -> float:
    """The largest difference of the log-probabilities that requests were told, in nats; infinite where one is missing,
    or nobody was told any."""
    told = {key: want.logprobs for key, want in wanted.outcomes.items() if want.logprobs}
    differences = [logprobs.difference(result.outcomes[key].logprobs, want) for key, want in told.items()]
    return max(differences, default=float("inf"))
