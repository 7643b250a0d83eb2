"""One load of conversations, turn by turn.

bench_serving has conversations too, but they go through chat templates and text: an answer does not come back as the
tokens it was, and one figure stands for all turns. Here a prompt is ids, and answers' ids are kept.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import client, generate
from .generate import Answer
from .loads import Conversations
from .options import Options

#: One conversation: what is asked in each turn, as ids.
Questions = list[list[int]]


def draw(options: Options, load: Conversations, vocabulary: int, purpose: str) -> list[Questions]:
    """Random ids below ``vocabulary``: the first prompt and every later turn's new tokens, of each conversation."""
    ids = random.Random(f"{options.seed} {purpose}")
    lengths = [options.input_len] + [load.turn_len] * (load.turns - 1)
    return [[ids.choices(range(vocabulary), k=length) for length in lengths] for _ in range(load.at_once)]


async def hold(url: str, conversations: Sequence[Questions], tokens: int) -> list[list[Answer]]:
    """Begin all at once; each asks its next question as soon as it is answered. Returns every one's answers.

    Raises
        ClientError: a turn was not answered with ``tokens`` tokens.
    """
    import aiohttp

    async def one(questions: Questions) -> list[Answer]:
        said: list[int] = []
        answers = []
        for question in questions:
            said += question
            answers.append(await generate.ask(session, url, said, tokens))
            said += answers[-1].ids
        return answers

    # A connection a request, as bench_serving has it: no turn's first token profits of one that is open.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=10 * 2**20) as session:
        return await asyncio.gather(*map(one, conversations))


def figures(held: Sequence[Sequence[Answer]], seconds: float) -> dict[str, Any]:
    """What came of it, under bench_serving's names where it has them; ``turns`` has one entry a turn."""
    tokens = sum(len(answer.ids) for answers in held for answer in answers)
    turns = list(zip(*held, strict=True))
    return {
        "duration": seconds,
        "total_output_tokens": tokens,
        "output_throughput": tokens / seconds,
        "turns": [_turn(turn, turns[number - 1] if number else None) for number, turn in enumerate(turns)],
    }


def _turn(turn: Sequence[Answer], last: Sequence[Answer] | None) -> dict[str, Any]:
    """One turn of all conversations.

    *_ttft_ms: request to first token; *_cached_tokens: of the prompt, found in the cache; last_turn_tokens: the last
    turn's prompt and answer, and cached_share what of them was found; computed_tokens: of the prompt, prefilled. Tokens
    are means.
    """
    import numpy as np

    ttft = np.array([answer.ttft for answer in turn]) * 1e3
    prompt = np.array([answer.prompt for answer in turn])
    cached = np.array([answer.cached for answer in turn])
    before = np.array([answer.prompt + len(answer.ids) for answer in last]) if last is not None else None
    return {
        "mean_ttft_ms": float(ttft.mean()),
        "median_ttft_ms": float(np.median(ttft)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "prompt_tokens": float(prompt.mean()),
        "last_turn_tokens": float(before.mean()) if before is not None else None,
        "cached_tokens": float(cached.mean()),
        "min_cached_tokens": int(cached.min()),
        "cached_share": float((cached / before).mean()) if before is not None else None,
        "computed_tokens": float((prompt - cached).mean()),
    }


def measure(options: Options, load: Conversations, *, url: str, model: Path | str) -> tuple[dict[str, Any], str]:
    """Warm up with as many other conversations, flush the cache, and hold those of ``load``.

    Returns
        what its entry says, and the same in a line for people.

    Raises
        ClientError: a turn was not answered in full.
    """
    from sglang.benchmark import serving, utils

    vocabulary = utils.get_tokenizer(client.tokenizer(options, model)).vocab_size
    warm_up = draw(options, load, vocabulary, "warm-up")
    # answers of the same length: what a later turn finds, and computes, is compiled for before it is measured
    asyncio.run(hold(url, warm_up, options.output_len))
    client.patient(serving.flush_server_cache)(url, "sglang")
    conversations = draw(options, load, vocabulary, "load")
    began = time.perf_counter()
    held = asyncio.run(hold(url, conversations, options.output_len))
    found = figures(held, time.perf_counter() - began)
    last = found["turns"][-1]
    return {"answers": found}, (
        f"{found['output_throughput']:.1f} tokens/s, turn {load.turns}: TTFT {last['median_ttft_ms']:.0f} ms, "
        f"{last['cached_tokens']:.0f} of {last['prompt_tokens']:.0f} prompt tokens cached"
    )
