"""The scenarios of testing.md, level 3, as data. Token ids are drawn below ``vocab``; 0 to 2 are kept out of prompts.

Greedy decoding of a small random model soon repeats itself, and a prompt that was answered before leaves its answer in
the n-gram corpus: both give drafts something to match, so accepted runs of every length occur.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .scenario import Request, Scenario


def tokens(seed: int, n: int, vocab: int) -> tuple[int, ...]:
    """n random token ids."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, vocab) for _ in range(n))


def repetitive(seed: int, n: int, vocab: int, motif: int = 7) -> tuple[int, ...]:
    """n token ids that repeat a motif."""
    unit = tokens(seed, motif, vocab)
    return (unit * (n // motif + 1))[:n]


def turns(vocab: int) -> Scenario:
    """Conversations whose next prompt is the last one with its answer: prefix hits on states of finished requests."""
    return Scenario(
        "turns",
        (
            Request("a1", repetitive(1, 70, vocab), 24),
            Request("b1", tokens(2, 33, vocab), 40, at_step=1),
            Request("a2", tokens(3, 5, vocab), 30, continues="a1"),
            Request("b2", tokens(4, 1, vocab), 17, continues="b1"),
            Request("a3", tokens(5, 9, vocab), 21, continues="a2"),
            Request("again", repetitive(1, 70, vocab), 40, after="a3"),
        ),
    )


def drawn(vocab: int) -> Scenario:
    """The same at a temperature, and the first prompt once more without."""
    plain = turns(vocab)
    warm = [replace(request, temperature=1.5) for request in plain.requests]
    return replace(plain, name="drawn", requests=(*warm, replace(plain.requests[0], rid="cold", at_step=2)))


def drawn_for_long(vocab: int, length: int = 500) -> Scenario:
    """Requests at a temperature that are told what each of their tokens was worth: whatever a draw leads to."""
    long = [Request(f"long{i}", tokens(30 + i, 18, vocab), length, temperature=1.0, logprobs=0) for i in range(3)]
    return Scenario("drawn for long", tuple(long))


def returning(vocab: int, conversations: int = 8, rounds: int = 3, together: int = 2) -> Scenario:
    """Conversations that take turns, ``together`` at a time: when one comes back others have been served since. Some of
    them begin alike."""
    begun = [tokens(400 + i // 2, 34, vocab) + tokens(420 + i, 9 + i, vocab) for i in range(conversations)]
    requests: list[Request] = []
    for turn in range(rounds):
        for i in range(conversations):
            before = requests[-together].rid if len(requests) >= together else None
            prompt = tokens(450 + 10 * turn + i, 3 + i, vocab) if turn else begun[i]
            continues = f"c{i}t{turn - 1}" if turn else None
            requests.append(Request(f"c{i}t{turn}", prompt, 9 + (5 * i + turn) % 11, after=before, continues=continues))
    return Scenario("returning", tuple(requests))


def forks(vocab: int, others: int = 9) -> Scenario:
    """Conversations of two turns, whose first is asked for something else after ``others`` have been served, and whose
    second goes on then: of what that begins with the device has the first turn, and the host the second."""
    requests: list[Request] = []

    def then(rid: str, prompt: tuple[int, ...], answer: int, continues: str | None = None) -> None:
        after = requests[-1].rid if requests else None
        requests.append(Request(rid, prompt, answer, after=after, continues=continues))

    names = [f"f{i}" for i in range(3)]
    for i, name in enumerate(names):
        then(name, tokens(500 + i, 40 + 15 * i, vocab), 12 + i)
        then(f"{name}-second", tokens(510 + i, 6, vocab), 11 + i, name)
    for i in range(others):
        then(f"other{i}", tokens(520 + i, 30 + i, vocab), 6)
    for i, name in enumerate(names):
        then(f"{name}-else", tokens(540 + i, 7, vocab), 9, name)
    for i, name in enumerate(names):
        then(f"{name}-third", tokens(550 + i, 5, vocab), 13, f"{name}-second")
    return Scenario("forks", tuple(requests))


def talks(vocab: int) -> Scenario:
    """Conversations that SGLang itself keeps the tokens of, two at a time; one of them branches. Who asks the same
    outside of them shares their prefixes."""
    return Scenario(
        "talks",
        (
            Request("a1", repetitive(1, 70, vocab), 24, session="a"),
            Request("b1", tokens(2, 33, vocab), 40, at_step=1, session="b"),
            Request("beside", tokens(2, 33, vocab) + tokens(9, 9, vocab), 20, at_step=2),
            Request("a2", tokens(3, 5, vocab), 30, continues="a1", session="a"),
            Request("b2", tokens(4, 1, vocab), 17, continues="b1", session="b"),
            Request("a3", tokens(5, 9, vocab), 21, continues="a2", session="a"),
            Request("b3", tokens(6, 90, vocab), 11, continues="b2", session="b"),
            Request("b4", tokens(7, 3, vocab), 13, continues="b3", session="b"),
            Request("branch", tokens(8, 4, vocab), 15, continues="a1", after="b4", session="a"),
            Request("again", repetitive(1, 70, vocab), 40, after="a3"),
        ),
    )


def shared(vocab: int) -> Scenario:
    """One long prefix under several prompts: hits while its owner still runs, branches, an identical prompt."""
    system = tokens(10, 80, vocab)
    return Scenario(
        "shared",
        (
            Request("s1", system + tokens(11, 12, vocab), 30),
            Request("s2", system + tokens(12, 7, vocab), 25, when=("s1", 1)),
            Request("s3", system[:65] + tokens(13, 20, vocab), 20, when=("s1", 6)),
            Request("s4", system + tokens(11, 12, vocab), 36, after="s1"),
            Request("s5", system + tokens(11, 12, vocab) + tokens(14, 3, vocab), 18, after="s2"),
            Request("s6", system + tokens(12, 7, vocab)[:4], 18, after="s3"),
        ),
    )


def chunked(vocab: int) -> Scenario:
    """Prompts of several prefill chunks, one of them ending one past a chunk boundary, while others decode."""
    return Scenario(
        "chunked",
        (
            Request("short", repetitive(20, 20, vocab), 48),
            Request("long", tokens(21, 200, vocab), 20, at_step=2),
            Request("edge", tokens(22, 129, vocab), 20, at_step=3),
            Request("more", tokens(23, 6, vocab), 20, continues="long"),
            Request("longer", tokens(21, 190, vocab) + tokens(24, 15, vocab), 12, after="long"),
        ),
    )


def mixed(vocab: int) -> Scenario:
    """Answers that end at every offset while long prompts are prefilled, and what follows on each of them.

    With mixed chunks a running request then decodes one token at a time, as a tail of the prefill.
    """
    ends = (6, 7, 8, 9, 10, 12, 13)
    long = [Request(f"long{i}", tokens(120 + i, 390, vocab), 6, when=("d6", 3 + i)) for i in range(2)]
    first = [Request(f"d{n}", repetitive(230 + n, 66 + n, vocab), n) for n in ends]
    stopped = [
        Request("s3", repetitive(236, 72, vocab), 30, after="long1", stop_like=("d6", 3)),
        Request("s5", repetitive(243, 79, vocab), 30, after="long1", stop_token_like=("d13", 5)),
        Request("long2", tokens(122, 390, vocab), 6, when=("s3", 1)),
    ]
    ended = [f"d{n}" for n in ends] + ["s3", "s5"]
    follow = [Request(f"f_{rid}", tokens(140 + i, 3, vocab), 12, continues=rid) for i, rid in enumerate(ended)]
    return Scenario("mixed", (*first, *long, *stopped, *follow))


def mixed_grammars(vocab: int) -> Scenario:
    """Constrained answers beside prefills of many chunks, and what follows on each of them: with mixed chunks they are
    decoded now by a verify, now as a tail, and end as either."""
    lengths = (5, 7, 8, 11, 14, 22)
    constrained = [Request(f"g{n}", repetitive(250 + n, 30, vocab), 40, grammar=n) for n in lengths]
    free = Request("free", repetitive(280, 30, vocab), 40)
    long = [Request(f"long{n}", tokens(160 + n, 200, vocab), 6, when=("free", n)) for n in (3, 9, 14)]
    follow = [Request(f"f{n}", tokens(170 + n, 3, vocab), 12, continues=f"g{n}") for n in lengths]
    return Scenario("mixed_grammars", (*constrained, free, *long, *follow))


def boundaries(vocab: int) -> Scenario:
    """Prompts that end at, just before and just after a chunk's or a track interval's boundary, each asked twice."""
    lengths = (15, 16, 17, 47, 48, 63, 64, 65, 79, 127, 128, 129)
    first = tuple(
        Request(f"n{n}", repetitive(100 + n, n, vocab, motif=9), 20, at_step=i) for i, n in enumerate(lengths)
    )
    again = tuple(Request(f"again{n}", repetitive(100 + n, n, vocab, motif=9), 24, after="n129") for n in lengths)
    follow = tuple(Request(f"f{n}", tokens(300 + n, 5, vocab), 10, continues=f"again{n}") for n in lengths)
    return Scenario("boundaries", first + again + follow)


def staggered(vocab: int) -> Scenario:
    """Arrivals and ends spread over the steps: the batch grows, shrinks and is compacted; rows and slots are reused."""
    ends = (30, 9, 22, 4, 35, 13, 18, 27)
    arrivals = (0, 1, 2, 2, 5, 8, 9, 14)
    return Scenario(
        "staggered",
        tuple(
            Request(f"r{i}", repetitive(30 + i, 11 + 6 * i, vocab, motif=5 + i), end, at_step=arrival)
            for i, (end, arrival) in enumerate(zip(ends, arrivals, strict=True))
        ),
    )


def limits(vocab: int) -> Scenario:
    """``max_new_tokens`` that end a request inside an accepted run, at every offset, and what follows on such ends."""
    prompt = repetitive(40, 40, vocab)
    first = Request("warm", prompt, 40)
    capped = tuple(Request(f"m{n}", prompt, n, after="warm") for n in (1, 2, 3, 4, 5, 6, 7, 17))
    follow = tuple(Request(f"f{n}", tokens(41 + n, 3, vocab), 12, continues=f"m{n}") for n in (2, 3, 5, 6, 17))
    return Scenario("limits", (first, *capped, *follow))


def stops(vocab: int) -> Scenario:
    """Stop strings and stop tokens met inside an accepted run, and follow-ups on the cut answers."""
    prompt = tokens(50, 30, vocab)
    return Scenario(
        "stops",
        (
            Request("warm", prompt, 32),
            Request("string3", prompt, 32, after="warm", stop_like=("warm", 3)),
            Request("string8", prompt, 32, after="warm", stop_like=("warm", 8)),
            Request("token4", prompt, 32, after="warm", stop_token_like=("warm", 4)),
            Request("token9", prompt, 32, after="warm", stop_token_like=("warm", 9)),
            Request("next3", tokens(51, 4, vocab), 14, continues="string3"),
            Request("next4", tokens(52, 4, vocab), 14, continues="token4"),
        ),
    )


def aborts(vocab: int) -> Scenario:
    """Requests aborted in the queue, between prefill chunks and while they decode; their prompts come again."""
    a, b, c = tokens(60, 90, vocab), repetitive(61, 35, vocab), tokens(62, 24, vocab)
    d = tokens(66, 180, vocab)
    return Scenario(
        "aborts",
        (
            Request("stays", repetitive(63, 25, vocab), 45),
            Request("a", a, 40, at_step=1, abort_after=5),
            Request("b", b, 40, at_step=1, abort_after=11),
            Request("c", c, 40, at_step=3, abort_at_step=0),
            Request("d", d, 40, at_step=4, abort_at_step=2),
            Request("a2", a + tokens(64, 2, vocab), 16, after="a"),
            Request("b2", b, 30, after="b"),
            Request("c2", c, 16, after="c"),
            Request("d2", d[:140], 12, after="d"),
            Request("a3", tokens(65, 3, vocab), 10, continues="a2"),
        ),
    )


def grammars(vocab: int) -> Scenario:
    """Constrained answers beside an unconstrained one, and what follows on them.

    The ``past`` requests write down what the model says after the end of each answer; the ``late`` ones then draft it,
    so that their last accepted run goes past the end of the grammar. They have a salt of their own, or the cache would
    keep the states of the first ones and never own theirs.
    """
    prompt, lengths = repetitive(90, 30, vocab), (3, 8, 13, 14, 22)
    requests = [Request("free", prompt, 45)]
    requests += [Request(f"g{n}", prompt, 40, at_step=2 * i, grammar=n) for i, n in enumerate(lengths)]
    requests += [Request(f"past{n}", (), 12, continues=f"g{n}") for n in lengths]
    requests += [Request(f"late{n}", prompt, 40, after=f"past{n}", grammar=n, salt="late") for n in lengths]
    requests += [Request(f"f{n}", tokens(91 + n, 3, vocab), 12, continues=f"late{n}", salt="late") for n in lengths]
    return Scenario("grammars", tuple(requests))


def grammar_ends(vocab: int, prompt_length: int) -> Scenario:
    """Constrained answers that end one token after the other around a track boundary at 48, as in `grammars`.

    Of the tokens that an accepted run has past the end of a grammar some have crossed the boundary, some have not.
    """
    prompt, lengths = repetitive(90, prompt_length, vocab), range(44 - prompt_length, 57 - prompt_length)
    requests = [Request(f"g{n}", prompt, 60, at_step=2 * i, grammar=n) for i, n in enumerate(lengths)]
    requests += [Request(f"past{n}", (), 12, continues=f"g{n}") for n in lengths]
    for n in lengths:
        salt = f"late{n}"
        requests.append(Request(salt, prompt, 60, after=f"past{n}", grammar=n, salt=salt))
        requests.append(Request(f"f{n}", tokens(91 + n, 3, vocab), 12, continues=salt, salt=salt))
    return Scenario(f"grammar_ends{prompt_length}", tuple(requests))


def ends_beside_a_grammar(vocab: int) -> Scenario:
    """Short answers beside a constrained one: for its sake SGLang plans a verify before it looks at the last one, so
    that a request which has ended is verified once more. The follow-ups hit what was cached meanwhile."""
    requests = [Request("g", repetitive(90, 30, vocab), 180, grammar=160)]
    answers = [(i, n) for i in range(5) for n in (17, 18)]
    for k, (i, n) in enumerate(answers):
        prompt = repetitive(500 + 50 * i + n, 30, vocab, motif=5 + i)
        requests.append(Request(f"r{i}_{n}", prompt, n, at_step=1 + 7 * k))
    requests += [Request(f"z{i}_{n}", tokens(900 + n, 6, vocab), 8, continues=f"r{i}_{n}") for i, n in answers]
    return Scenario("ends_beside_a_grammar", tuple(requests))


def pressure(vocab: int) -> Scenario:
    """More conversations than slots and tokens: run it on a small engine, where it must evict and retract."""
    first = tuple(Request(f"p{i}", repetitive(70 + i, 20 + 9 * i, vocab), 30 + i, at_step=i) for i in range(7))
    second = tuple(Request(f"q{i}", tokens(80 + i, 4, vocab), 20, continues=f"p{i}") for i in range(7))
    third = tuple(Request(f"z{i}", repetitive(70 + i, 20 + 9 * i, vocab), 12, after=f"q{i}") for i in (0, 3, 6))
    return Scenario("pressure", first + second + third)


def flushed(vocab: int) -> Scenario:
    """An earlier conversation again after the cache was flushed: nothing of the old states may be left."""
    return Scenario("flushed", tuple(turns(vocab).requests[:3]), flush=True)


def beside(*parts: Scenario) -> Scenario:
    """Scenarios that begin together: what takes steps is shared by more requests. "turns/a1" is turns' a1."""

    def renamed(part: Scenario, request: Request) -> Request:
        def name(rid: str | None) -> str | None:
            return rid and f"{part.name}/{rid}"

        def place(of: tuple[str, int] | None) -> tuple[str, int] | None:
            return of and (f"{part.name}/{of[0]}", of[1])

        return replace(
            request,
            rid=f"{part.name}/{request.rid}",
            after=name(request.after),
            continues=name(request.continues),
            when=place(request.when),
            stop_like=place(request.stop_like),
            stop_token_like=place(request.stop_token_like),
        )

    requests = [renamed(part, request) for part in parts for request in part.requests]
    return Scenario("+".join(part.name for part in parts), tuple(requests))


def unhurried(vocab: int) -> tuple[Scenario, ...]:
    """Scenarios in which nothing hangs on the exact tokens of another request."""
    return tuple(make(vocab) for make in (turns, shared, chunked, staggered))


def common(vocab: int) -> tuple[Scenario, ...]:
    """All scenarios that one ordinary engine runs: pairs one after the other, and one alone."""
    pairs = ((turns, shared), (chunked, limits), (staggered, aborts, stops))
    return (*(beside(*(maker(vocab) for maker in pair)) for pair in pairs), flushed(vocab))
