"""What SGLang's `popen_launch_server` starts: it runs ``sglang serve ...`` by name, and this stands in for that name.

So that a server is of the interpreter that runs the benchmark (also where `sglang` is not on PATH, or nothing was
installed at all), writes to a log of its own, stays out of reach of the terminal's Ctrl-C (the benchmark stops it in
order) and does not outlive the benchmark if that is killed outright. `folder` makes the stand-in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import sys
from pathlib import Path

LOG = "MTP_BENCH_SERVER_LOG"
_PR_SET_PDEATHSIG = 1


def folder(path: Path) -> Path:
    """Make ``path`` with an executable named sglang in it, for PATH."""
    path.mkdir(parents=True, exist_ok=True)
    command = path / "sglang"
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n', encoding="utf-8"
    )
    command.chmod(0o755)
    return path


def main(argv: list[str]) -> None:
    """Become ``python -m sglang.launch_server``; ``argv`` begins with ``serve``."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
