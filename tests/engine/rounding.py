"""Engines in 16 bits: what rounding may do is measured, on engines that do not speculate.

A state after the same tokens, and the lead of the best next token over the next best, differ between a plain engine of
eight requests at a time, one of a single request, and a prefill of the same tokens in one go. That spread bounds what
speculation may do: states differ by no more than twice as much, and a token differs only where its lead was less than
twice the spread of leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .spec import Result
from .states import name_of, relative_error

FACTOR = 2.0


@dataclass(frozen=True)
class Spread:
    """Largest relative error of a state and largest difference of a lead, between engines that do not speculate."""

    state: float
    lead: float
    states: int

    @property
    def tie(self) -> float:
        """A lead below this is a tie."""
        return FACTOR * self.lead


def spread(first: Result, others: Sequence[Result]) -> Spread:
    """How far ``others`` are from ``first``, at prefixes both saw."""
    states = {}
    for record in first.records:
        states.setdefault(record.prefix, record.state)
    pairs = [(r.state, states[r.prefix]) for run in others for r in run.records if r.prefix in states]
    leads = [abs(gap - first.gaps[at]) for run in others for at, gap in run.gaps.items() if at in first.gaps]
    if not pairs or not leads:
        raise ValueError(f"nothing to compare: {len(pairs)} states and {len(leads)} leads in common")
    return Spread(max(relative_error(*pair) for pair in pairs), max(leads), len(pairs))


def token_differences(result: Result, wanted: Result, tie: float) -> tuple[list[str], list[str]]:
    """Requests that first differ from the wanted run's at a token whose lead was ``tie`` or more, and at a tie.

    A request whose prompt differs follows on one that is in one of the lists.
    """
    wrong, ties = [], []
    for key, want in wanted.outcomes.items():
        got = result.outcomes[key]
        if got.prompt != want.prompt or got.tokens == want.tokens:
            continue
        at = next((i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), None)
        if at is None:
            wrong.append(f"{key}: {len(got.tokens)} tokens, not {len(want.tokens)}")
            continue
        lead = wanted.gaps[name_of([*want.prompt, *want.tokens[:at]])]
        line = f"{key}: {got.tokens[at]} not {want.tokens[at]} at position {at}, which led by {lead:.2e}"
        (ties if lead < tie else wrong).append(line)
    return wrong, ties
