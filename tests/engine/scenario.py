"""What is asked of an engine: requests, when they arrive and what stops them, as plain picklable data.

Everything is expressed so that it means the same with and without speculation: arrivals and aborts may be tied to
other requests' progress in tokens, follow-up prompts are built from earlier outputs inside the run, and stop
conditions can be taken from another request's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PAUSED = 3
"""Turns of the event loop without a forward that a pause takes."""


@dataclass(frozen=True)
class Request:
    """One request. ``rid`` is unique within its scenario.

    Arrival: once all of ``at_step`` (event-loop steps since the scenario began), ``after`` (that request finished) and
    ``when`` = (rid, n) (that request has emitted n tokens) hold. With ``continues`` the prompt is that request's
    prompt + its output + ``prompt``: a follow-up turn (it implies ``after``). Requests share cached prefixes only with
    those of the same ``salt`` and LoRA ``adapter``. In a ``session`` SGLang itself keeps what the request continues,
    and is sent the rest. ``logprobs`` asks for log-probabilities, of the prompt's tokens from that one on and of the
    answer's.

    Tokens are drawn at ``temperature``, and pay a ``penalty`` = (SGLang's name of it, how much) for having been said,
    which a verify applies to all its drafts as it stands at the root. Either makes a request ``free``: what it says
    hangs on more than its prompt, and is not compared.

    Ends: ``max_new_tokens``; an abort after n emitted tokens (``abort_after``) or n steps after its arrival
    (``abort_at_step``; 0 catches it in the queue, 1 or 2 in its prefill chunks); ``stop_like`` = (rid, i): the stop
    string is the text of tokens i and i+1 of that finished request's output; ``stop_token_like`` = (rid, i): the same
    with token i as a stop token id; ``grammar`` = n: the answer must be one of grammar.py's, n tokens and an end.
    """

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    at_step: int = 0
    after: str | None = None
    when: tuple[str, int] | None = None
    continues: str | None = None
    abort_after: int | None = None
    abort_at_step: int | None = None
    stop_like: tuple[str, int] | None = None
    stop_token_like: tuple[str, int] | None = None
    grammar: int | None = None
    temperature: float = 0.0
    penalty: tuple[str, float] | None = None
    logprobs: int | None = None
    salt: str | None = None
    adapter: str | None = None
    session: str | None = None

    @property
    def free(self) -> bool:
        """Whether its tokens may be others in another engine."""
        return self.temperature > 0 or self.penalty is not None


@dataclass(frozen=True)
class Scenario:
    """Requests that run together. ``flush`` empties the radix cache and the pools before it begins; ``sleep`` gives
    their memory back and takes it again; ``weights`` is a folder whose weights are loaded before. Its sessions are
    opened with their first requests, as ``streaming`` ones or plain, and closed at the end. ``pauses`` are (step, how):
    from that event-loop step on the engine pauses for `PAUSED` turns, all requests kept where they are ("in_place") or
    retracted ("retract"). ``in_pauses`` is a folder with the weights that the engine has: in every pause they are
    loaded again, behind a sleep if all requests are retracted and SGLang sleeps beside waiting ones."""

    name: str
    requests: tuple[Request, ...]
    flush: bool = False
    sleep: bool = False
    weights: str | None = None
    streaming: bool = False
    pauses: tuple[tuple[int, str], ...] = ()
    in_pauses: str | None = None

    def __post_init__(self):
        rids = [request.rid for request in self.requests]
        if len(set(rids)) != len(rids):
            raise ValueError(f"scenario {self.name}: request ids repeat: {rids}")
        for request in self.requests:
            others = (request.after, request.continues, *(x and x[0] for x in (request.when, request.stop_like)))
            for other in others:
                if other is not None and other not in rids:
                    raise ValueError(f"scenario {self.name}: {request.rid} waits for unknown request {other!r}")


@dataclass
class Outcome:
    """What became of one request. ``prompt_logprobs`` and ``logprobs``, in nats, are empty where none were asked for;
    ``free`` is the request's."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    free: bool = False
    finish: str = ""
    aborted: bool = False
    cached_tokens: int = 0
    verify_steps: int = 0
    accepted_drafts: int = 0
    retractions: int = 0


def mean_accept_length(outcomes: Mapping[str, Outcome]) -> float:
    """Tokens a verify step yielded on average, the bonus token included; 0 without any verify step."""
    steps = sum(outcome.verify_steps for outcome in outcomes.values())
    drafts = sum(outcome.accepted_drafts for outcome in outcomes.values())
    return 1 + drafts / steps if steps else 0.0
