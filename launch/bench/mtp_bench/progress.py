"""Progress people can see: which stage, for how long, how much longer. Plain lines, also in a CI log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

EVERY_SECONDS = 10.0


class Progress:
    """Writes to the ``stream`` there was at first: bench_serving's output is turned away from it."""

    def __init__(self, stream: TextIO | None = None, every: float = EVERY_SECONDS) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._every = every
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One line, with the time so far."""
        self._stream.write(f"[{clock(self.seconds)}] {text}\n")
        self._stream.flush()

    @contextlib.contextmanager
    def waiting(self, title: str, news: Callable[[], str]) -> Iterator[None]:
        """Says ``title``, and every few seconds what ``news`` has to tell, until the body is done."""
        self.say(title)
        done = threading.Event()

        def tell() -> None:
            while not done.wait(self._every):
                self.say(f"  {news()}")

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()


def clock(seconds: float) -> str:
    """``3:05``, or ``1:02:03`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
