"""Training text: an endless few-shot prompt, as tokens, with a loss weight for each token.

Problems follow each other exactly as in SGLang's few-shot GSM8K prompt. Some are chats instead: ``<|user|>``, solved
examples, the open question, ``<|assistant|>``, the answer, ``<|end|>``. Only a chat's answer ends with the end token.
"""

import itertools
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinymodels import tokenizer as tok
from tinymodels.problems import problems

CHAT_SHARE = 0.15
QUESTION_WEIGHT = 0.1


@dataclass
class Corpus:
    """tokens [T] int64; answer [T] bool: part of an answer; starts [D] int64: where a row may begin."""

    tokens: Tensor
    answer: Tensor
    starts: Tensor

    def to(self, device: torch.device) -> "Corpus":
        return Corpus(self.tokens.to(device), self.answer.to(device), self.starts.to(device))

    def batch(self, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random rows that begin at a problem: tokens [rows, length] and their loss weights, float32."""
        picked = torch.randint(len(self.starts), (rows,), generator=generator, device=self.starts.device)
        first = self.starts[picked].clamp(max=len(self.tokens) - length)
        index = first[:, None] + torch.arange(length, device=self.starts.device)
        return self.tokens[index], self.answer[index].float() * (1 - QUESTION_WEIGHT) + QUESTION_WEIGHT


def _pieces(seed: int, count: int) -> list[tuple[str, bool, bool]]:
    """(text, is an answer, a row may begin here) of ``count`` problems."""
    rng = random.Random(f"corpus-{seed}")
    pieces: list[tuple[str, bool, bool]] = []
    examples_left = -1  # >= 0: inside a chat
    for problem in itertools.islice(problems(seed, "train"), count):
        question, answer = f"Question: {problem.question}\nAnswer:", f" {problem.answer}"
        begins = examples_left < 0
        if begins and rng.random() < CHAT_SHARE:
            examples_left = rng.choice((0, 0, 0, 1, 2, 3, 5))
            question = tok.USER + question
        if examples_left == 0:
            pieces += [(question + tok.ASSISTANT, False, begins), (answer + tok.END, True, False)]
        else:
            pieces += [(question, False, begins), (answer + "\n\n", True, False)]
        examples_left = max(examples_left - 1, -1)
    return pieces


def _encode_share(folder: Path, seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One worker's share: tokens int16, answer bool, starts int64."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pieces = _pieces(seed, count)
    encoded = tok.load(folder).encode_batch_fast([text for text, _, _ in pieces])
    lengths = np.array([len(e.ids) for e in encoded])
    tokens = np.fromiter(itertools.chain.from_iterable(e.ids for e in encoded), np.int16, lengths.sum())
    answer = np.repeat(np.array([is_answer for _, is_answer, _ in pieces]), lengths)
    offsets = np.concatenate([[0], lengths.cumsum()[:-1]])
    return tokens, answer, offsets[np.array([begins for _, _, begins in pieces])]


def build(folder: Path, seed: int, count: int, workers: int) -> Corpus:
    """``count`` training problems, tokenised by ``workers`` processes; deterministic in (seed, count, workers)."""
    share = -(-count // workers)
    jobs = [(folder, seed * 1000 + worker, share) for worker in range(workers)]
    if workers == 1:
        parts = [_encode_share(*jobs[0])]
    else:
        with ProcessPoolExecutor(workers) as pool:
            parts = list(pool.map(_encode_share, *zip(*jobs, strict=True)))
    bases = np.cumsum([0] + [len(tokens) for tokens, _, _ in parts[:-1]])
    return Corpus(
        torch.from_numpy(np.concatenate([tokens for tokens, _, _ in parts])).long(),
        torch.from_numpy(np.concatenate([answer for _, answer, _ in parts])),
        torch.from_numpy(np.concatenate([starts + base for base, (_, _, starts) in zip(bases, parts, strict=True)])),
    )
