"""Held-out evaluation: few-shot greedy accuracy, and how long the accepted drafts of the MTP head are."""

import itertools
from dataclasses import asdict, dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinymodels.base import TinyModel
from tinymodels.problems import Problem, answer_value, few_shot_prompt, problems

SHOTS = 5
DRAFT_STEPS = 3


@dataclass(frozen=True)
class Scores:
    """exact_match: answers whose every token is the argmax, given the tokens before (greedy decoding writes exactly
    this answer); accept_length: tokens per verify step with DRAFT_STEPS chained drafts, the bonus token included;
    draft_accuracy: share of right drafts of each step, given the true tokens before."""

    exact_match: float
    accept_length: float
    draft_accuracy: list[float]

    def to_json(self) -> dict[str, float | list[float]]:
        return asdict(self)


def held_out(count: int, seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """(few-shot examples from train, ``count`` test problems)."""
    shots = list(itertools.islice(problems(seed, "train"), SHOTS))
    return shots, list(itertools.islice(problems(seed, "test"), count))


def walk(accepted: list[int]) -> tuple[int, int]:
    """Verify steps over one answer. accepted[t]: tokens that a step starting at t commits -> (tokens, steps)."""
    position = steps = 0
    while position < len(accepted):
        position += accepted[position]
        steps += 1
    return len(accepted), steps


@torch.no_grad()
def score(model: TinyModel, tokenizer: Tokenizer, count: int, device: torch.device, rows: int = 32) -> Scores:
    """Teacher-forced scores over ``count`` held-out problems."""
    shots, tests = held_out(count)
    exact = tokens_total = steps_total = 0
    hits, seen = [0] * DRAFT_STEPS, [0] * DRAFT_STEPS
    for batch in _batched(tests, rows):
        prompts = [tokenizer.encode(few_shot_prompt(shots, p.question)).ids for p in batch]
        answers = [tokenizer.encode(f" {p.answer}\n\nQuestion").ids for p in batch]
        padded = _pad([p + a for p, a in zip(prompts, answers, strict=True)], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            outputs = [model.lm_head(hidden).argmax(-1).cpu() for hidden in model(padded, DRAFT_STEPS)]
        tokens = padded.cpu()
        # right[k][b, t]: is token t what output k predicts for it? Output 0 sits at row t-1, draft s at row t-2.
        right = [outputs[0] == tokens[:, 1:]] + [out[:, :-1] == tokens[:, 2:] for out in outputs[1:]]
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            first, last = len(prompt), len(prompt) + len(answer)
            exact += bool(right[0][row, first - 1 : last - 1].all())
            accepted = []
            for t in range(first, last):  # t is in the context: drafts are for t+1, t+2, ...
                drafts = [bool(right[1 + s][row, t + s - 1]) for s in range(DRAFT_STEPS) if t + 1 + s < last]
                for s, good in enumerate(drafts):
                    hits[s] += good
                    seen[s] += 1
                accepted.append(1 + [*drafts, False].index(False))
            committed, steps = walk(accepted)
            tokens_total, steps_total = tokens_total + committed, steps_total + steps
    return Scores(exact / count, tokens_total / steps_total, [h / max(s, 1) for h, s in zip(hits, seen, strict=True)])


@torch.no_grad()
def generate_accuracy(
    model: TinyModel, tokenizer: Tokenizer, count: int, device: torch.device, max_new_tokens: int = 110
) -> float:
    """Share of held-out questions answered right by greedy decoding as SGLang's benchmark reads it (no cache: slow)."""
    shots, tests = held_out(count)
    rows = [tokenizer.encode(few_shot_prompt(shots, p.question)).ids for p in tests]
    prompts = [len(row) for row in rows]
    stop = tokenizer.token_to_id("Question")
    running = list(range(count))
    for _ in range(max_new_tokens):
        padded = _pad([rows[i] for i in running], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.trunk(padded)
            ends = torch.tensor([len(rows[i]) - 1 for i in running], device=device)
            new = model.lm_head(hidden[torch.arange(len(running), device=device), ends]).argmax(-1).tolist()
        for i, token in zip(running, new, strict=True):
            rows[i].append(token)
        running = [i for i, token in zip(running, new, strict=True) if token != stop]
        if not running:
            break
    texts = [tokenizer.decode(row[start:]) for row, start in zip(rows, prompts, strict=True)]
    right = [answer_value(text) == answer_value(p.answer) for text, p in zip(texts, tests, strict=True)]
    return sum(right) / count


def _batched(items: list[Problem], size: int) -> list[list[Problem]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _pad(rows: list[list[int]], device: torch.device, multiple: int = 64) -> Tensor:
    """Right-pad with token 0 to a common length, a multiple of 64 (plus one): int64 [rows, length]."""
    length = -(-max(map(len, rows)) // multiple) * multiple + 1
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
