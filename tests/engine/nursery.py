"""Where engines on a CPU are forked from: a process a mode that has loaded the plugin and waits.

Loading the plugin is work that is the same for all engines of a mode. So a nursery does it once, is itself forked from
the process that has imported SGLang, and forks an engine for each job. Plugin and hooks are then exactly as they are in
a process that loads them by itself. What of SGLang an engine has imported while it was built, the next ones find
imported.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from .child import child_main, own_streams
from .scenario import Scenario
from .spec import EngineSpec


class Nursery:
    """A process that has loaded the plugin in ``mode`` under ``env``; ends with the process that made it."""

    def __init__(self, mode: str, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nursery-")
        self._log = Path(self._folder.name, "log")
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, mode, dict(env), str(self._log)), daemon=True)
        self._process.start()
        theirs.close()
        self._imported: set[str] = set()

    def run(
        self, spec: EngineSpec, scenarios: Sequence[Scenario], out: Path, log: Path, imported: Iterable[str] = ()
    ) -> int | None:
        """Fork an engine and wait for it: its exit code, or None if it was killed after ``spec.timeout`` seconds.

        ``log`` begins with what loading the plugin printed. imported: what the engine need not import any more.
        Raises EOFError if the plugin could not be loaded, or one of the modules; the log says why.
        """
        try:
            fresh = [name for name in imported if name not in self._imported]
            self._imported.update(fresh)
            self._ours.send((fresh, (spec, list(scenarios), str(out), str(log))))
            pid = self._ours.recv()
            if self._ours.poll(spec.timeout):
                return self._ours.recv()
            os.kill(pid, signal.SIGKILL)
            self._ours.recv()
            return None
        except (EOFError, OSError):
            self._process.join()
            shutil.copy(self._log, log)
            raise EOFError from None


def _main(jobs: Connection, mode: str, env: dict[str, str], log: str) -> None:
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    own_streams(log)
    try:
        os.environ["SGLANG_MAMBA_MTP_MODE"] = mode
        os.environ.update(env)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        while True:
            imported, job = jobs.recv()
            for name in imported:
                importlib.import_module(name)
            pid = os.fork()
            if pid == 0:
                jobs.close()
                shutil.copy(log, job[-1])
                child_main(*job)
            jobs.send(pid)
            _, status = os.waitpid(pid, 0)
            jobs.send(os.waitstatus_to_exitcode(status))
    except EOFError:  # nobody is left to ask
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
