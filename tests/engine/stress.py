"""Requests as a busy server meets them: random lengths, arrivals and ends, prefixes shared and conversations resumed.

All of it is drawn from a seed. What a request asks for never depends on how fast an engine is, so every engine answers
the same; only where an abort lands may differ (`harness.token_differences`), and what is drawn or penalised
(`Request.free`), beside which everything else must be the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .scenario import Request, Scenario
from .scenarios import repetitive, tokens

END = 24
"""A grammar's answer is shorter than this."""

PENALTIES = (("frequency_penalty", 0.5), ("presence_penalty", 1.5), ("repetition_penalty", 1.2))

AGAIN = 3
"""Requests of a wave that the next one begins with (`operated`)."""

PAUSES = ("in_place", "retract", "retract", "in_place")


@dataclass(frozen=True)
class Mix:
    """Shares of requests; what is left over is asked plainly. ``longest`` prompt in tokens, before what it resumes.

    ``several`` answers of one prompt are asked as SGLang asks them: the prompt first, then as many requests at once.
    ``scored`` requests want log-probabilities.
    """

    resumed: float = 0.3
    repeated: float = 0.1
    aborted: float = 0.12
    stopped: float = 0.12
    constrained: float = 0.1
    drawn: float = 0.04
    penalised: float = 0.04
    several: float = 0.05
    scored: float = 0.2
    longest: int = 300


def waves(seed: int, count: int, vocab: int, size: int = 40, mix: Mix = Mix()) -> list[Scenario]:
    """``count`` requests in waves of ``size``; before some of the waves the radix cache is flushed, and the engine
    pauses three times in each."""
    rng = random.Random(seed)
    found = []
    for first in range(0, count, size):
        name = f"wave{first // size}"
        requests = _requests(rng, min(size, count - first), vocab, mix)
        flush = bool(found) and rng.random() < 0.5
        pauses = tuple(zip(sorted(rng.sample(range(10, 5 * size // 2, 10), 3)), rng.sample(PAUSES, 3), strict=True))
        found.append(Scenario(name, tuple(requests), flush=flush, pauses=pauses))
    return found


def operated(todo: list[Scenario], weights: tuple[str, str] | None) -> list[Scenario]:
    """The waves as an operator treats the engine: before every first of three the engine is given the first of the
    ``weights``, which it begins with, before every second it sleeps, before every third it is given the second of the
    weights, which are others. In the pauses of the first and the third it is given those that it has. None: no weights
    are loaded. Some of what a wave asks is asked again at the head of the next, which must not find the old states."""
    found = []
    for i, wave in enumerate(todo):
        turn, changes = i % 3, {}
        if turn == 1:
            changes = {"sleep": True, "flush": False}
        elif weights is not None:
            folder = weights[turn // 2]
            flush = wave.flush and turn == 0
            changes = {"weights": folder if i else None, "in_pauses": folder, "flush": flush}
        again = _again(todo[i - 1]) if i else ()
        found.append(replace(wave, requests=(*again, *wave.requests), **changes))
    return found


def _again(wave: Scenario) -> tuple[Request, ...]:
    """The latest of a wave's requests that say the same whenever they are asked, as requests of another."""
    alone = [each for each in wave.requests if _is_plain(each) and each.continues is None]
    return tuple(replace(each, rid=f"again{i}", at_step=i, after=None) for i, each in enumerate(alone[-AGAIN:]))


def asked(todo: list[Scenario], model: str) -> dict[str, list[Scenario]]:
    """By the weights that they are answered with, ``model`` being the first: the waves, without what an operator does
    about them."""
    found: dict[str, list[Scenario]] = {}
    for wave in todo:
        model = wave.weights or model
        found.setdefault(model, []).append(replace(wave, weights=None, sleep=False, in_pauses=None))
    return found


def _requests(rng: random.Random, count: int, vocab: int, mix: Mix) -> list[Request]:
    systems = [tokens(rng.randrange(10**6), rng.choice((16, 48, 64, 65, 130)), vocab) for _ in range(3)]
    step, asked = 0, []
    while len(asked) < count:
        step += rng.choice((0, 0, 0, 1, 1, 3, 8))
        request = _request(rng, f"r{len(asked)}", step, asked, systems, vocab, mix)
        several = _is_plain(request) and rng.random() < mix.several
        asked += _several(request, rng.choice((2, 3))) if several else [request]
    return asked[:count]


def _several(request: Request, n: int) -> list[Request]:
    """The prompt alone, and ``n`` answers of it."""
    prompt = replace(request, rid=f"{request.rid}p", max_new_tokens=0, logprobs=None)
    return [prompt, *(replace(request, rid=f"{request.rid}n{i}", after=prompt.rid) for i in range(n))]


def _request(rng, rid, step, asked, systems, vocab, mix: Mix) -> Request:
    plain = [request for request in asked if _is_plain(request)]
    prompt, continues, after = _prompt(rng, systems, vocab, mix), None, None
    kind = rng.random()
    if plain and kind < mix.resumed:
        continues = rng.choice(plain).rid
        prompt = prompt[: rng.randint(0, 12)]
    elif plain and kind < mix.resumed + mix.repeated:
        again = rng.choice(plain)
        prompt, continues, after = again.prompt, again.continues, again.rid
    request = Request(rid, prompt, rng.choice((1, 2, 3, 5, 8, 13, 20, 33)), step, after, continues=continues)
    return _ending(rng, request, plain, mix)


def _prompt(rng, systems, vocab, mix: Mix) -> tuple[int, ...]:
    """Short ones are as likely as long ones; half of them under a system prompt."""
    length = round(mix.longest ** rng.random())
    make = rng.choice((tokens, repetitive))
    shared = rng.choice(systems)[: rng.choice((None, None, 40))] if rng.random() < 0.5 else ()
    return tuple(shared) + make(rng.randrange(10**6), length, vocab)


def _ending(rng, request: Request, plain: list[Request], mix: Mix) -> Request:
    fields = dict(vars(request))
    kind = rng.random()
    long = [other for other in plain if other.max_new_tokens >= 8]
    if kind < mix.aborted:
        where = rng.choice(("abort_after", "abort_at_step"))
        fields |= {where: rng.randint(0, 6), "max_new_tokens": 40}
    elif kind < mix.aborted + mix.stopped and long:
        # the answer to the same prompt, met again as a string or a token to stop at
        like = rng.choice(long)
        stop = rng.choice(("stop_like", "stop_token_like"))
        same = {"prompt": like.prompt, "continues": like.continues, "after": like.rid}
        fields |= same | {stop: (like.rid, rng.randint(1, 6)), "max_new_tokens": 30}
    elif kind < (constrained := mix.aborted + mix.stopped + mix.constrained):
        fields |= {"grammar": rng.randint(1, END - 1), "max_new_tokens": END + 4}
    elif kind < constrained + mix.drawn:
        fields |= {"temperature": 1.0}
    elif kind < constrained + mix.drawn + mix.penalised:
        fields |= {"penalty": rng.choice(PENALTIES)}
    if rng.random() < mix.scored:
        # from the start (which hides what is cached), or the answer's alone
        fields |= {"logprobs": rng.choice((-1, -1, 0))}
    return Request(**fields)


def _is_plain(request: Request) -> bool:
    """Whether it has exactly as many tokens as it asks for, and the same in every engine."""
    ends = (request.abort_after, request.abort_at_step, request.stop_like, request.stop_token_like, request.grammar)
    return all(end is None for end in ends) and not request.free and request.max_new_tokens > 0
