"""Builders of the demo's values, every field with a default."""

from __future__ import annotations

from pathlib import Path

from mtp_demo.client import Answer, Batch, Problem, Scored
from mtp_demo.memory import SpeculativeState
from mtp_demo.run import Outcome, Run


def answer(tokens: tuple[int, ...] = (1, 2, 3), *, text: str = "#### 7", verify_steps: int = 0) -> Answer:
    return Answer(
        text=text,
        tokens=tokens,
        prompt_tokens=100,
        cached_tokens=80,
        verify_steps=verify_steps,
        accepted_drafts=max(0, len(tokens) - 1 - verify_steps),
        finish="stop",
    )


def run(*answers: Answer, accuracy: float = 1.0) -> Run:
    state = SpeculativeState("snapshot", 9000, 1000, 9000, True)
    batch = Batch(answers or (answer(),), 2.0)
    return Run(("python", "-m", "sglang.launch_server"), Path("log"), 40.0, "mode snapshot", batch, accuracy, state)


def outcome(plain: Run, speculative: Run, *, verdicts=(), failures=()) -> Outcome:
    return Outcome(Path("tiny-test"), plain, speculative, tuple(verdicts), tuple(failures))


def scored(token: int, first: tuple[float, int], second: tuple[float, int]) -> Scored:
    return Scored(token, (first, second))


def sure(token: int) -> Scored:
    """A position where the server has no doubt."""
    return scored(token, (-0.001, token), (-7.0, token + 1000))


PROBLEM = Problem("What is 3 + 4?", "3+4=7\n#### 7")
