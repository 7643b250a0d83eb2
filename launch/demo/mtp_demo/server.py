"""One SGLang server as a child process: start, wait until it answers, stop it and everything it started.

SGLang's own `popen_launch_server` and `kill_process_tree` do not fit here: they import torch into the program that
waits, look for the server every ten seconds, say nothing while it starts, and try a start that failed a second time
with the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from .stages import stage

HOST = "127.0.0.1"
PORTS = (20_000, 32_000)
TAIL_LINES = 40
STOP_SECONDS = 10  # to end by itself; then it is killed
_PR_SET_PDEATHSIG = 1
# Never through a proxy of the environment: the server is on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A server did not start, died, or refused a request."""


def free_port() -> int:
    """A TCP port nobody listens on now, drawn below those that connections take by themselves.

    A server binds it many seconds later.
    """
    draw = random.SystemRandom()  # programs side by side may have been seeded alike
    while True:
        port = draw.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def with_byte_code(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (by default this process's environment) for programs that import SGLang: without byte code, which
    ``PYTHONDONTWRITEBYTECODE`` keeps them from leaving for each other, imports take four times as long."""
    environment = dict(os.environ if base is None else base)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def server_environment(device: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server on ``device``: no network, and on a CPU one thread (more are slower)."""
    environment = with_byte_code(base)
    environment.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", PYTHONUNBUFFERED="1")
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def require_health(port: int, otherwise: str) -> None:
    """Does an SGLang server answer at ``port``?

    Raises
        ServerError: none does; the message ends with ``otherwise``, which says what to do.
    """
    url = f"http://{HOST}:{port}/health"
    try:
        with _OPENER.open(url, timeout=10) as answer:
            if answer.status == 200:
                return
            reason = f"status {answer.status}"
    except OSError as error:
        reason = str(getattr(error, "reason", error))
    raise ServerError(f"no server answers at {url}: {reason}; {otherwise}")


class Server:
    """``command`` plus host and port (None: a free one), from `start` to `stop`; ``log`` gets what it prints."""

    def __init__(self, command: list[str], *, device: str, log: Path, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.command = [*command, "--host", HOST, "--port", str(self.port)]
        self.log = log
        self.start_seconds = 0.0
        self._environment = server_environment(device)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 600.0, on_wait: Callable[[float, str], None] = lambda seconds, line: None) -> None:
        """Start the process and wait until ``/health`` answers; call `stop` whatever happens.

        ``on_wait``, called twice a second, gets the seconds so far and what the server is doing (`stages`).

        Raises
            ServerError: the process ended, or ``timeout`` seconds passed; the message shows the log's end.
        """
        began = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        while not self._healthy():
            seconds = time.monotonic() - began
            status = self._process.poll()
            if status is not None:
                raise ServerError(f"the server ended with status {status} after {seconds:.0f} s\n{self.tail()}")
            if seconds > timeout:
                raise ServerError(f"the server did not answer within {timeout:.0f} s\n{self.tail()}")
            on_wait(seconds, stage(self._log_text()))
            time.sleep(0.5)
        self.start_seconds = time.monotonic() - began

    def stop(self) -> None:
        """End the server and every process it started. Safe to call twice, and to interrupt: it then kills at once."""
        process = self._process
        if process is None:
            return
        family = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # start_new_session: its own group
            for child in family:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.wait()
            psutil.wait_procs(family, timeout=STOP_SECONDS)
            self._process = None

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """GET ``path``, its JSON."""
        return self._request(urllib.request.Request(self._url(path)), timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> Any:
        """POST ``body`` as JSON to ``path``, the JSON that comes back."""
        headers = {"Content-Type": "application/json"}
        return self._request(urllib.request.Request(self._url(path), json.dumps(body).encode(), headers), timeout)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The log's end, headed by where the whole log is."""
        return "\n".join([f"--- the end of {self.log}", *self._log_end().splitlines()[-lines:], "---"])

    def _log_end(self, size: int = 16384) -> str:
        return self._log_text()[-size:]

    def _log_text(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}{path}"

    def _healthy(self) -> bool:
        try:
            with _OPENER.open(self._url("/health"), timeout=30) as answer:
                return answer.status == 200
        except OSError:  # refused, reset, timed out, or 503 while the model loads
            return False

    def _request(self, request: urllib.request.Request, timeout: float) -> Any:
        try:
            with _OPENER.open(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            body = error.read().decode(errors="replace")[:2000]
            raise ServerError(f"{request.selector}: HTTP {error.code}: {body}\n{self.tail()}") from error
        except OSError as error:
            raise ServerError(f"{request.selector}: {error}\n{self.tail()}") from error


def die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills it if this program is killed outright."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
