"""Are the outputs with speculation those without, and where not, was it a tie?

In float32 on a CPU outputs must be equal token for token. On a GPU in bfloat16 two tokens may be so close that
verifying several tokens at once, which rounds differently, picks the other. A difference counts as such a tie only if
the server without speculation, reading the prompt and the differing output,
  1. has both tokens as its top two where the outputs part, no further apart than the bound, and
  2. would have said every later token of that output itself, up to the same bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .client import Scored


@dataclass(frozen=True)
class Difference:
    """Outputs of one request that differ. position: the first that does; tokens there are None past an output's end."""

    request: int
    position: int
    plain_token: int | None
    speculative_token: int | None


@dataclass(frozen=True)
class Verdict:
    """Whether a difference is a tie. gap: nats between the top two where the outputs part."""

    difference: Difference
    tie: bool
    gap: float | None
    reason: str


def first_difference(request: int, plain: Sequence[int], speculative: Sequence[int]) -> Difference | None:
    """Where two outputs part, or None if they are equal."""
    if list(plain) == list(speculative):
        return None
    shorter = min(len(plain), len(speculative))
    position = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    return Difference(
        request,
        position,
        plain[position] if position < len(plain) else None,
        speculative[position] if position < len(speculative) else None,
    )


def differences(plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]) -> list[Difference]:
    """The requests whose outputs differ."""
    pairs = enumerate(zip(plain, speculative, strict=True))
    found = [first_difference(request, *outputs) for request, outputs in pairs]
    return [difference for difference in found if difference is not None]


def judge(difference: Difference, scored: Sequence[Scored], bound: float) -> Verdict:
    """Is ``difference`` a tie? ``scored``: the plain server's view of the whole speculative output."""

    def verdict(tie: bool, gap: float | None, reason: str) -> Verdict:
        return Verdict(difference, tie, gap, reason)

    if difference.plain_token is None or difference.speculative_token is None:
        return verdict(False, None, "one output ends where the other goes on")
    here = scored[difference.position]
    gap = here.top[0][0] - here.top[1][0]
    top_two = {here.top[0][1], here.top[1][1]}
    if top_two != {difference.plain_token, difference.speculative_token}:
        return verdict(False, gap, f"the top two are {sorted(top_two)}, not the tokens chosen")
    if gap > bound:
        return verdict(False, gap, f"the top two are {gap:.3f} nats apart, more than {bound}")
    for position, later in enumerate(scored[difference.position + 1 :], difference.position + 1):
        reach = [logprob for logprob, token in later.top if token == later.token]
        if not reach or later.top[0][0] - reach[0] > bound:
            return verdict(False, gap, f"after the tie, token {later.token} at {position} is not the plain server's")
    return verdict(True, gap, f"the top two are {gap:.3f} nats apart")


def unjudged(difference: Difference) -> Verdict:
    """The verdict where no difference is allowed."""
    return Verdict(difference, False, None, "outputs must be equal token for token")
