"""The demo's program: `bash launch/demo.sh` sets up the environment and runs it. Flags: mtp_demo/options.py."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mtp_demo.options import Options, parse

PASSED, FAILED, SERVER_FAILED = 0, 1, 3


def main(argv: Sequence[str]) -> int:
    """Run every model; returns the exit status."""
    options = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)  # unwinds, so that the servers are stopped

    from mtp_demo import report
    from mtp_demo.progress import Progress
    from mtp_demo.run import ModelRun, Outcome
    from mtp_demo.server import ServerError
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    progress = Progress(console)
    began = time.monotonic()
    logs = _logs(options)
    outcomes: list[Outcome] = []
    errors: list[str] = []
    try:
        for model in options.models:
            outcomes.append(ModelRun(options, model, logs, progress)())
            console.print(report.table(options, outcomes[-1]))
    except ServerError as error:
        errors.append(str(error))
    finally:  # also when interrupted: what is known so far, passed: false
        if options.json is not None:
            report.write(options.json, report.document(options, outcomes, argv=argv, errors=errors))
    failures = [f"{outcome.model.name}: {failure}" for outcome in outcomes for failure in outcome.failures]
    for failure in errors + failures:
        progress.say(f"[bold red]FAILED[/] {escape(failure)}")
    if errors or failures:
        progress.say(f"The servers' logs are in {escape(str(logs))}")
        return SERVER_FAILED if errors else FAILED
    seconds = time.monotonic() - began
    progress.say(f"[bold green]passed[/] in {seconds:.0f} s; the servers' logs are in {escape(str(logs))}")
    return PASSED


def _logs(options: Options) -> Path:
    if options.logs is None:
        return Path(tempfile.mkdtemp(prefix="mamba-mtp-demo-"))
    options.logs.mkdir(parents=True, exist_ok=True)
    return options.logs.resolve()


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
