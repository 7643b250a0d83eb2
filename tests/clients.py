"""Clients that hear an answer as it comes: what each was told, and how it ended, whatever becomes of the server."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import requests

TIMEOUT = 600.0
"""Seconds without a byte after which a client gives up: no answer here takes as long."""

START = 1800.0
"""Seconds a server may take to answer: only one that hangs takes as long."""


class Client(threading.Thread):
    """One greedy request for ``tokens`` tokens, in a thread of its own.

    ``leaves_after``: of a streamed answer it hears this many characters and closes the connection.

    Attributes
        told: the text that has arrived.
        complete: whether the answer was said to be whole: a finish reason, or the end of OpenAI's stream.
        error: what `requests` raised; None while it runs, and after a response that ended as HTTP has it.
    """

    def __init__(
        self,
        port: int,
        prompt: Sequence[int],
        tokens: int,
        *,
        path: str = "/generate",
        stream: bool = True,
        leaves_after: float = math.inf,
    ) -> None:
        super().__init__(daemon=True)
        self._leaves_after = leaves_after
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        if path == "/generate":
            body = {"input_ids": list(prompt), "sampling_params": sampling | {"max_new_tokens": tokens}}
        else:
            body = {"model": "default", "prompt": list(prompt), "max_tokens": tokens, **sampling}
        self._url, self._body, self._stream = f"http://127.0.0.1:{port}{path}", body | {"stream": stream}, stream
        self.told, self.complete = "", False
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with requests.Session() as session:
                session.trust_env = False  # never through a proxy
                with session.post(self._url, json=self._body, stream=self._stream, timeout=TIMEOUT) as answer:
                    answer.raise_for_status()
                    lines = answer.iter_lines()
                    while len(self.told) < self._leaves_after and (line := next(lines, None)) is not None:
                        self._hear(line.decode().removeprefix("data: "))
        except requests.RequestException as error:
            self.error = error

    def _hear(self, line: str) -> None:
        """A line of a stream, or the JSON that is the whole answer. ``/generate`` repeats what it has said."""
        if line == "[DONE]":
            self.complete = True
        elif line:
            said = json.loads(line)
            if "error" in said:
                raise requests.RequestException(said["error"])
            if "choices" in said:
                (said,) = said["choices"]
                self.told += said["text"]
                self.complete |= said["finish_reason"] is not None
            else:
                self.told = said["text"]
                self.complete |= said["meta_info"]["finish_reason"] is not None


def wait_for(what: Callable[[], bool], patience: float) -> bool:
    """Whether ``what`` comes true within ``patience`` seconds."""
    end = time.monotonic() + patience
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
