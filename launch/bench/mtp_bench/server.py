"""One server, started and stopped by SGLang's own test helpers."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mtp_demo.server import free_port

from . import logs, serve, shapes
from .options import Options
from .plan import Serving

HOST = "127.0.0.1"
POLL_SECONDS = 1.0
STOP_SECONDS = 15.0
MEM_FRACTION = 0.85
#: Lines on decoding are what running requests are counted from: every so many steps.
LOG_INTERVAL = {"cpu": 1, "cuda": 10}


class ServerError(RuntimeError):
    """A server did not start."""


class _Clock:
    """`time` for SGLang's wait for a server, which looks every ten seconds: most of a tiny model's start."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))


def arguments(options: Options, serving: Serving, model: Path | str) -> list[str]:
    """The flags of ``launch_server`` behind the model's path: for all alike, then the mode's own."""
    flags = ["--device", options.device, "--tp-size", str(options.tp), "--random-seed", str(options.seed)]
    flags += ["--max-running-requests", str(options.max_running)]
    flags += ["--decode-log-interval", str(LOG_INTERVAL[options.device])]
    if options.dtype is not None:
        flags += ["--dtype", options.dtype]
    if options.shape is not None:
        flags += shapes.flags(model)
    if options.max_total_tokens is not None:
        flags += ["--max-total-tokens", str(options.max_total_tokens)]
    elif options.mem_fraction is not None or options.device == "cuda":
        flags += ["--mem-fraction-static", str(options.mem_fraction or MEM_FRACTION)]
    if options.device == "cuda":
        flags += ["--cuda-graph-max-bs-decode", str(options.max_running)]
    flags += options.server_args
    if serving.draft is not None:
        flags += serving.draft.flags(options.algorithm, options.draft_model)
    return [*flags, *serving.mode.flags]


def environment(options: Options, serving: Serving) -> dict[str, str]:
    """What a server's environment has on top of ours, by SGLang's names."""
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
    if Path(options.model).exists():
        # TRUE and not 1: where SGLang's helper reads 1, a server that fails is started a second time.
        variables.update(HF_HUB_OFFLINE="TRUE", TRANSFORMERS_OFFLINE="1")
    if options.device == "cpu":
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # more are slower
    if options.shape is not None and options.device == "cuda":  # on a CPU 0.5.23 would call a Triton kernel for it
        variables["SGLANG_SIMULATE_UNIFORM_EXPERTS"] = "1"
    if serving.draft is not None and options.accept is not None:
        variables["SGLANG_SIMULATE_ACC_LEN"] = str(options.accept)
    return variables


class Server:
    """From `start` to `stop`. log: what it prints; command: what was run; start_seconds: until it generated."""

    def __init__(self, options: Options, serving: Serving, model: Path | str, log: Path) -> None:
        self.serving = serving
        self.url = f"http://{HOST}:{free_port()}"
        self.log = log
        self.arguments = arguments(options, serving, model)
        self.environment = environment(options, serving)
        self.command = ["python", "-m", "sglang.launch_server", "--model-path", str(model), *self.arguments]
        self.start_seconds = 0.0
        self._options = options
        self._model = str(model)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it generates; call `stop` whatever happens.

        Raises
            ServerError: it ended, or took longer than it may; the message shows the log's end.
        """
        from sglang.test import test_utils

        commands = serve.folder(self.log.parent / "bin")
        variables = {
            **self.environment,
            serve.LOG: str(self.log),
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        with mock.patch.object(test_utils, "time", _Clock()), contextlib.redirect_stdout(io.StringIO()):
            began = time.monotonic()
            try:
                self._process = test_utils.popen_launch_server(
                    self._model,
                    self.url,
                    timeout=self._options.start_timeout,
                    other_args=self.arguments,
                    env=variables,
                    device=self._options.device,
                )
            except Exception as error:  # the helper raises nothing more precise
                raise ServerError(f"{error}\n{logs.tail(self.log)}") from error
            self.start_seconds = time.monotonic() - began

    def stop(self) -> None:
        """End it and every process of it, also one that is still starting. Safe to call twice."""
        from sglang.srt.utils import kill_process_tree
        from sglang.test.test_utils import terminate_and_kill_process_tree

        process, self._process = self._process, None
        family = psutil.Process().children(recursive=True)
        if process is not None:
            terminate_and_kill_process_tree(process, terminate_timeout=STOP_SECONDS, wait_timeout=60)
        for member in family:  # a server that ended leaves children that are nobody's
            with contextlib.suppress(psutil.Error):
                member.kill()
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=60)

    @contextlib.contextmanager
    def stopped_afterwards(self) -> Iterator[Server]:
        """`stop` on the way out."""
        try:
            yield self
        finally:
            self.stop()
