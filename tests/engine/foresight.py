"""DFLASH drafts that know the answer.

A block of a random draft model is accepted by chance alone. Here row after row is drafted right for a number of tokens
of our choice, so that runs of every length are accepted, with the real draft model, verify, scheduler and radix cache
around it.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from typing import Any

from .states import Record, as_tokens

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and its answer."""


def apply(known: Iterable[Text]) -> None:
    """Let DFLASH draft the ``known`` texts, as many of a block's tokens as `_turns` says, and after them a wrong one.
    What is in no text the draft model drafts."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    if not known:
        return
    whole = {prompt: prompt + answer for prompt, answer in known}
    generate, sample = DFlashWorkerV2.forward_batch_generation, DFlashWorkerV2._greedy_sample_from_vocab_parallel_head
    running: list[Any] = []
    turns: dict[int, itertools.cycle[int]] = {}

    @functools.wraps(generate)
    def noting(self, batch, *args, **kwargs):
        running[:] = [batch]
        return generate(self, batch, *args, **kwargs)

    @functools.wraps(sample)
    def foreseeing(self, *args, **kwargs):
        drafts = sample(self, *args, **kwargs)
        (batch,) = running
        nodes = self.block_size - 1
        turn = turns.setdefault(nodes, _turns(nodes))
        for row, req, root in zip(drafts.view(-1, nodes), batch.reqs, batch.seq_lens.tolist(), strict=True):
            ahead = whole.get(tuple(req.origin_input_ids), ())[root + 1 :]
            right = min(next(turn), len(ahead))
            row[:right] = row.new_tensor(ahead[:right])
            if right < min(nodes, len(ahead)):
                row[right] = ahead[right] - 1 if ahead[right] else 1
        return drafts

    DFlashWorkerV2.forward_batch_generation = noting
    DFlashWorkerV2._greedy_sample_from_vocab_parallel_head = foreseeing


def _turns(nodes: int) -> itertools.cycle[int]:
    """How many of ``nodes`` drafts are right: each number as often as any other."""
    return itertools.cycle(random.Random(nodes).sample(range(nodes + 1), nodes + 1))


def accepted(records: Iterable[Record]) -> set[int]:
    """How many tokens the verifies of a run that recorded every one of them have committed, the root included."""
    lengths: dict[str, int] = {}
    found = set()
    for record in records:
        if record.kind not in ("prefill", "decode"):
            continue
        request, length = record.where.partition("@")[0], len(as_tokens(record.prefix))
        if record.kind == "decode":
            found.add(length - lengths[request])
        lengths[request] = length
    return found
