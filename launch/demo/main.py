"""The demo's program: `bash launch/demo.sh` sets up the environment and runs it. Flags: mtp_demo/options.py."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mtp_demo import interrupt
from mtp_demo.interrupt import Interrupted
from mtp_demo.options import Options, parse

PASSED, FAILED, SERVER_FAILED = 0, 1, 3


def main(argv: Sequence[str]) -> int:
    """Run every model; returns the exit status: 128 + its number after a signal."""
    options = parse(argv)
    interrupt.catch()  # unwinds, so that the servers are stopped

    from mtp_demo import report
    from mtp_demo.progress import Progress
    from mtp_demo.run import ModelRun, Outcome
    from mtp_demo.server import ServerError

    progress = Progress()
    began = time.monotonic()
    logs = _logs(options)
    outcomes: list[Outcome] = []
    errors: list[str] = []
    interrupted: Interrupted | None = None
    try:
        for model in options.models:
            outcomes.append(ModelRun(options, model, logs, progress)())
            progress.say(report.table(options, outcomes[-1]))
    except ServerError as error:
        errors.append(str(error))
    except Interrupted as signal:  # on its way here it stopped the server that ran
        interrupted = signal
        errors.append(f"{signal} after {time.monotonic() - began:.0f} s; no server is left running")
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
        raise
    finally:  # what is known so far, passed: false
        if options.json is not None:
            report.write(
                options.json, report.document(options, outcomes, argv=argv, errors=errors, interrupted=interrupted)
            )
    failures = [f"{outcome.model.name}: {failure}" for outcome in outcomes for failure in outcome.failures]
    for failure in errors + failures:
        progress.say(f"{'STOPPED' if interrupted and failure in errors else 'FAILED'} {failure}", "bad")
    seconds = time.monotonic() - began
    if not errors and not failures:
        progress.say(f"passed in {seconds:.0f} s; the servers' logs are in {logs}", "good")
        return PASSED
    progress.say(f"The servers' logs are in {logs}")
    if interrupted is not None:
        return interrupted.status
    return SERVER_FAILED if errors else FAILED


def _logs(options: Options) -> Path:
    if options.logs is None:
        return Path(tempfile.mkdtemp(prefix="mamba-mtp-demo-"))
    options.logs.mkdir(parents=True, exist_ok=True)
    return options.logs.resolve()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Interrupted as signal:  # while the outputs were being written
        sys.exit(signal.status)
    except KeyboardInterrupt:  # before anything was started
        sys.exit(130)
