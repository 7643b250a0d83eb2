"""The demo's two outputs: a table for people and the same as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from . import machine
from .client import Answer
from .interrupt import Interrupted
from .options import ROOT, Options
from .run import Outcome, Run

SCHEMA = 1
COMMAND = "DEMO_COMMAND"  # what was typed, set by launch/demo.sh


def table(options: Options, outcome: Outcome) -> str:
    """The figures of one model, a line each under a title."""
    runs = (outcome.plain, outcome.speculative)
    state = outcome.speculative.state
    rows = [
        ("", "no speculation", "speculation"),
        ("accuracy", *(f"{run.accuracy:.3f}" for run in runs)),
        ("accept length", "1", _number(outcome.speculative.batch.accept_length)),
        ("tokens/s", *(f"{run.batch.tokens_per_second:.1f}" for run in runs)),
        ("identical to no speculation", "", identical_text(options, outcome)),
        ("speculative state", *(_bytes(run.state.total if run.state else None) for run in runs)),
        ("  per request", *(_bytes(run.state.per_request if run.state else None) for run in runs)),
        ("  SGLang's own verify", "", _bytes(state.stock_total if state else None)),
        ("prompt tokens from the cache", *(_share(*_cached(run.batch.answers)) for run in runs)),
        ("server start", *(f"{run.start_seconds:.0f} s" for run in runs)),
    ]
    name, plain, speculative = (max(len(row[column]) for row in rows) for column in range(3))
    rule = "-" * (name + plain + speculative + 6)
    lines = [f"{a:<{name}}   {b:>{plain}}   {c:>{speculative}}" for a, b, c in rows]
    title = f"{outcome.model.name} on {options.device}, {options.dtype}; {options.speculation.text}"
    lines = ["", title, rule, lines[0], rule, *lines[1:], rule]
    if outcome.speculative.announced:
        lines.append(f"mamba-mtp: {outcome.speculative.announced}")
    return "\n".join([*lines, ""])


def identical_text(options: Options, outcome: Outcome) -> str:
    """How many outputs are equal, how many differ at a tie, how many differ."""
    text = f"{outcome.identical} of {outcome.requests}"
    wrong = len(outcome.verdicts) - outcome.ties
    if not options.strict:
        text += f", {outcome.ties} at ties (gap <= {options.tie_gap} nats)"
    return text + (f", {wrong} WRONG" if wrong else "")


def document(
    options: Options,
    outcomes: Sequence[Outcome],
    *,
    argv: Sequence[str],
    errors: Sequence[str] = (),
    interrupted: Interrupted | None = None,
) -> dict[str, Any]:
    """Everything a reader needs to know what was run and what came of it."""
    speculation = options.speculation
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get(COMMAND) or shlex.join(["bash", "launch/demo.sh", *argv]),
        "passed": not errors and len(outcomes) == len(options.models) and not any(o.failures for o in outcomes),
        "errors": list(errors),
        "interrupted": None if interrupted is None else interrupted.name,
        "versions": machine.versions(),
        "commit": machine.commit(ROOT),
        "device": machine.hardware(options.device),
        "settings": {
            "dtype": options.dtype,
            "mode": options.mode,
            "speculation": {**asdict(speculation), "flags": speculation.flags()},
            "questions": options.questions,
            "shots": options.shots,
            "parallel": options.parallel,
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
            "temperature": 0.0,
            "min_accuracy": options.min_accuracy,
            "strict": options.strict,
            "tie_gap_nats": None if options.strict else options.tie_gap,
        },
        "models": [_model(outcome) for outcome in outcomes],
    }


def write(path: Any, content: dict[str, Any]) -> None:
    """Write ``content`` as JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model(outcome: Outcome) -> dict[str, Any]:
    return {
        "model": outcome.model.name,
        "requests": outcome.requests,
        "identical": outcome.identical,
        "ties": outcome.ties,
        "differences": [
            {**asdict(verdict.difference), "tie": verdict.tie, "gap_nats": verdict.gap, "reason": verdict.reason}
            for verdict in outcome.verdicts
        ],
        "failures": list(outcome.failures),
        "without_speculation": _run(outcome.plain),
        "with_speculation": _run(outcome.speculative),
    }


def _run(run: Run) -> dict[str, Any]:
    cached, prompt = _cached(run.batch.answers)
    return {
        "command": shlex.join(run.command),
        "plugin": run.announced,
        "accuracy": run.accuracy,
        "accept_length": run.batch.accept_length,
        "accept_length_of_sglang": run.batch.accept_length_of_sglang,
        "verify_steps": sum(answer.verify_steps for answer in run.batch.answers),
        "output_tokens": run.batch.tokens,
        "seconds": run.batch.seconds,
        "tokens_per_second": run.batch.tokens_per_second,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": cached,
        "server_start_seconds": run.start_seconds,
        "speculative_state_bytes": asdict(run.state) if run.state else None,
        "output_sha256": hashlib.sha256(json.dumps([a.tokens for a in run.batch.answers]).encode()).hexdigest(),
    }


def _cached(answers: Sequence[Answer]) -> tuple[int, int]:
    return sum(answer.cached_tokens for answer in answers), sum(answer.prompt_tokens for answer in answers)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count:,} B" if count < 2**20 else f"{count / 2**20:,.1f} MiB"
