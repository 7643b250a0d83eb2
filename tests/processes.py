"""Fixtures of tests that load the plugin: SGLang is imported once, and what changes a process runs in a fork of it.

A folder's conftest.py imports them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
if not os.path.exists("/dev/nvidiactl"):
    ENVIRONMENT["SGLANG_USE_CPU_ENGINE"] = "1"
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

from sglang_mamba_mtp import cpu  # noqa: E402 - the environment first

cpu.install()  # before anything of SGLang is imported


@dataclass
class Fork:
    """How a forked process ended, and what it printed."""

    code: int
    output: str


def run_forked(body: Callable[[], object], **env: str) -> Fork:
    """Run ``body`` in a fork of this process. An exception or `SystemExit` ends it as it would end a program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "output")
        pid = os.fork()
        if pid == 0:
            _child(body, path, env)
        _, status = os.waitpid(pid, 0)
        return Fork(os.waitstatus_to_exitcode(status), path.read_text(errors="replace"))


def _child(body: Callable[[], object], path: Path, env: dict[str, str]) -> None:
    code = 1
    with contextlib.suppress(BaseException):
        output = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Not pytest's streams, which capture for the parent.
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        os.environ.update(env)
        try:
            body()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else (stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(code))


@pytest.fixture(scope="session")
def sglang() -> str:
    """SGLang imported as its scheduler process imports it, plugins not loaded. Returns its version."""
    import sglang.launch_server
    import sglang.srt.managers.scheduler

    return sglang.__version__


@pytest.fixture(scope="session")
def forked(sglang) -> Callable[..., Fork]:
    """`run_forked`, with SGLang imported."""
    return run_forked


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SGLANG_MAMBA_MTP")]:
        monkeypatch.delenv(name)
