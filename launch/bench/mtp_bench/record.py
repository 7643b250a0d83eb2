"""The JSON: what was run and what came of it. Written after every load; the next call takes it up."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtp_demo import machine

from .loads import BenchServing, Conversations, Load
from .modes import MODES
from .options import ROOT, Options
from .plan import Serving

SCHEMA = 1
COMMAND = "BENCH_COMMAND"  # what was typed, set by launch/bench_serving.sh
PLOTTED = "modes"
#: Lists of finished loads.
ENTRIES = (BenchServing.entries, Conversations.entries)


class RecordError(RuntimeError):
    """There is a record of something else where this one should go."""


def settings(options: Options) -> dict[str, Any]:
    """What must be the same for figures to stand in one table."""
    return {
        "model": options.name,
        "shape": options.shape is not None,
        "algorithm": options.algorithm,
        "draft_model": Path(options.draft_model).name if options.draft_model else None,
        "simulated_accept_length": options.accept,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "device": options.device,
        "dtype": options.dtype,
        "tp": options.tp,
        "mem_fraction_static": options.mem_fraction,
        "max_total_tokens": options.max_total_tokens,
        "max_running_requests": options.max_running,
        "server_args": list(options.server_args),
        "client_args": list(options.client_args),
        "seed": options.seed,
    }


def conditions(options: Options) -> dict[str, Any]:
    """Settings, versions and machine: two records of the same conditions may be joined."""
    return {
        "settings": settings(options),
        "versions": machine.versions(),
        "commit": machine.commit(ROOT),
        "device": machine.hardware(options.device),
    }


def check_env() -> dict[str, str]:
    """What ``python -m sglang.check_env`` prints, line by line; empty where it cannot look."""
    printed = io.StringIO()
    with contextlib.suppress(Exception), contextlib.redirect_stdout(printed):
        runpy.run_module("sglang.check_env", run_name="__main__")
    pairs = (line.partition(": ") for line in printed.getvalue().splitlines())
    return {name: value for name, separator, value in pairs if separator}


class Record:
    """One benchmark's record. content: as it is written.

    servers: one entry a start, with what it allocated; loads: one entry a finished load of bench_serving, which names
    its server's number; conversations: one a finished load of conversations, as well; refused: modes that do not apply;
    errors: what failed in the last call; ended: complete, failed, interrupted or time limit.
    """

    def __init__(self, options: Options) -> None:
        """Take up ``options.out`` if it is there, else begin anew.

        Raises
            RecordError: it was made under other conditions, or is no record.
        """
        self.path = options.out
        found = conditions(options)
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "began": _now(),
            "ended": "interrupted",  # until the end says otherwise: also if this process is killed outright
            "commands": [],
            **found,
            "environment": {},
            PLOTTED: {mode.name: mode.title for mode in options.modes},
            "refused": {},
            "errors": [],
            "servers": [],
            **{entries: [] for entries in ENTRIES},
        }
        if self.path.exists() and not options.fresh:
            self._take_up(found)
        self.content[PLOTTED] = {name: mode.title for name, mode in MODES.items() if name in self._modes(options)}
        self.content["commands"].append(os.environ.get(COMMAND) or "launch/bench/bench_serving.py")
        self.content.update(errors=[], ended="interrupted")

    def _modes(self, options: Options) -> set[str]:
        return {mode.name for mode in options.modes} | set(self.content[PLOTTED])

    def _take_up(self, found: dict[str, Any]) -> None:
        try:
            content = json.loads(self.path.read_text())
            same = {name: content[name] for name in found}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RecordError(
                f"--out: {self.path} is no record of this benchmark ({error}); --fresh replaces it"
            ) from None
        was, now = _flat(same), _flat(found)
        differences = [
            f"{name}: {was.get(name)!r} there, {now.get(name)!r} now"
            for name in {**was, **now}
            if was.get(name) != now.get(name)
        ]
        if differences:
            raise RecordError(
                f"--out: {self.path} was made under other conditions, and only equal ones are comparable:\n  "
                + "\n  ".join(differences)
                + "\nGive another --out, or --fresh to replace it."
            )
        self.content.update(content)

    def has(self, serving: Serving, load: Load) -> bool:
        """Is that load of that server finished?"""
        facts = {"serving": serving.name, **load.facts()}
        return any(facts.items() <= entry.items() for entry in self.content[load.entries])

    def seconds(self, load: Load) -> list[float]:
        """What loads of that name took."""
        return [entry["seconds"] for entry in self.content[load.entries] if entry["load"] == load.name]

    def add_server(self, serving: Serving, **facts: Any) -> int:
        """A server that started; returns its number."""
        self.content["servers"].append(
            {
                "serving": serving.name,
                "mode": serving.mode.name,
                "draft": serving.draft.name if serving.draft else None,
                **facts,
            }
        )
        self.write()
        return len(self.content["servers"]) - 1

    def add_load(self, serving: Serving, load: Load, server: int, **facts: Any) -> None:
        """A load that was answered in full by server number ``server``."""
        self.content[load.entries].append(
            {
                "serving": serving.name,
                "mode": serving.mode.name,
                "draft": serving.draft.name if serving.draft else None,
                **load.facts(),
                "date": _now(),
                "server": server,
                **facts,
            }
        )
        self.write()

    def fail(self, message: str) -> None:
        """Something that failed; the record is kept."""
        self.content["errors"].append(message)
        self.write()

    def end(self, how: str) -> None:
        """How the call ended."""
        self.content["ended"] = how
        self.write()

    def write(self) -> None:
        """See `write_whole`."""
        write_whole(self.path, self.content)


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as JSON, to a neighbour first, so that no interruption leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    neighbour = path.with_name(path.name + ".new")
    neighbour.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    neighbour.replace(path)


def _flat(conditions: dict[str, Any]) -> dict[str, Any]:
    """One level of names: ``settings.tp``, ``versions.sglang``, ``commit``."""
    flat: dict[str, Any] = {}
    for name, value in conditions.items():
        flat.update(
            {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
