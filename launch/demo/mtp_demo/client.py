"""Questions and answers: few-shot prompts as SGLang's GSM8K benchmark writes them, asked several at a time."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .server import Server

STOP = ("Question", "Assistant:", "<|separator|>")  # sglang.test.few_shot_gsm8k's


@dataclass(frozen=True)
class Problem:
    """A line of GSM8K's JSONL: the question, and its worked answer ending in ``#### n``."""

    question: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """What the server returned for one prompt. verify_steps: target verifies (0 without speculation)."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    verify_steps: int
    accepted_drafts: int
    finish: str


@dataclass(frozen=True)
class Batch:
    """Answers in the order of their prompts, and the wall-clock seconds of all of them."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float | None:
        """1 + accepted drafts per target verify, at most the draft tokens; None without speculation."""
        steps = sum(answer.verify_steps for answer in self.answers)
        return 1 + sum(answer.accepted_drafts for answer in self.answers) / steps if steps else None

    @property
    def accept_length_of_sglang(self) -> float | None:
        """SGLang's ``spec_accept_length``: tokens per target verify, the first of each answer (of the prefill) too."""
        steps = sum(answer.verify_steps for answer in self.answers)
        return self.tokens / steps if steps else None


def read_problems(path: Path, count: int) -> list[Problem]:
    """The first ``count`` problems of a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, count)]
    return [Problem(row["question"], row["answer"]) for row in rows]


def shots_text(shots: Sequence[Problem]) -> str:
    """The worked examples every prompt begins with."""
    return "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)


def prompt_text(shots: Sequence[Problem], question: str) -> str:
    """Worked examples, then the open question."""
    return f"{shots_text(shots)}Question: {question}\nAnswer:"


def answer_value(text: str) -> int | None:
    """The last number of a text, thousands separators ignored, as SGLang's benchmark reads an answer."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return int(numbers[-1]) if numbers else None


def accuracy(answers: Sequence[Answer], problems: Sequence[Problem]) -> float:
    """Share of answers whose number is the problem's."""
    right = [answer_value(a.text) == answer_value(p.answer) for a, p in zip(answers, problems, strict=True)]
    return sum(right) / len(right)


def ask(server: Server, prompt: Sequence[int], max_new_tokens: int) -> Answer:
    """Greedy answer to one prompt of token ids."""
    reply = server.post("/generate", request_body(prompt, max_new_tokens))
    return parse_reply(reply)


def ask_all(
    server: Server,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    parallel: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Batch:
    """Ask every prompt, ``parallel`` at a time; ``on_answer`` is called after each answer."""

    def one(prompt: Sequence[int]) -> Answer:
        answer = ask(server, prompt, max_new_tokens)
        on_answer()
        return answer

    pool = ThreadPoolExecutor(parallel)
    began = time.monotonic()
    try:
        answers = tuple(pool.map(one, prompts))
        return Batch(answers, time.monotonic() - began)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def request_body(prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """The body of ``/generate`` for a greedy answer."""
    sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "stop": list(STOP)}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def parse_reply(reply: dict[str, Any]) -> Answer:
    """An `Answer` from the JSON of ``/generate`` (the same names in SGLang 0.5.17 and 0.5.23)."""
    meta = reply["meta_info"]
    tokens = tuple(reply["output_ids"])
    return Answer(
        text=reply["text"],
        tokens=tokens,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        verify_steps=meta.get("spec_verify_ct", 0),
        accepted_drafts=meta.get("spec_num_correct_drafts", 0),
        finish=(meta.get("finish_reason") or {}).get("type", ""),
    )


@dataclass(frozen=True)
class Scored:
    """One position of a text the server read: the token there, and the two most likely, best first: (logprob, id)."""

    token: int
    top: tuple[tuple[float, int], ...]


def score(server: Server, prompt: Sequence[int], output: Sequence[int]) -> list[Scored]:
    """What the server itself would have said at every position of ``output`` after ``prompt``: one a position."""
    body = {
        "input_ids": [*prompt, *output],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "top_logprobs_num": 2,
    }
    return parse_scores(server.post("/generate", body), output)


def parse_scores(reply: dict[str, Any], output: Sequence[int]) -> list[Scored]:
    """`Scored` positions from the JSON of ``/generate`` with ``return_logprob``: the last ``len(output)`` inputs."""
    meta = reply["meta_info"]
    inputs = meta["input_token_logprobs"][-len(output) :]
    tops = meta["input_top_logprobs"][-len(output) :]
    scored = [
        Scored(token, tuple((float(logprob), int(candidate)) for logprob, candidate, *_ in top or ()))
        for (_, token, *_), top in zip(inputs, tops, strict=True)
    ]
    if [position.token for position in scored] != list(output) or any(len(position.top) < 2 for position in scored):
        raise ValueError("the server's input log-probabilities do not line up with the tokens that were sent")
    return scored
