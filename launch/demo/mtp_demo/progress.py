"""Progress people can see: a live line on a terminal, a plain line now and then elsewhere (CI logs).

Standard library only: with ``--python`` the interpreter has what SGLang needs, and nothing of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

EVERY_SECONDS = 10.0
_STYLES = {"bold": "1", "good": "1;32", "bad": "1;31"}
_CLEAR = "\r\033[K"


class Progress:
    """Shows on ``stream`` (standard output) what the program is waiting for."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()

    def say(self, text: str, style: str | None = None) -> None:
        """One line that stays. style: bold, good or bad, on a terminal."""
        if style is not None and self.live and "NO_COLOR" not in os.environ:
            text = f"\033[{_STYLES[style]}m{text}\033[0m"
        with self._lock:
            self.stream.write(f"{_CLEAR if self.live else ''}{text}\n")
            self.stream.flush()

    @contextlib.contextmanager
    def waiting(self, title: str) -> Iterator[Callable[[float, str], None]]:
        """Yields ``show(seconds, stage)``: how long it has taken, and what is being done now.

        A terminal shows both in place; elsewhere every new stage is a line, and a long one says every
        `EVERY_SECONDS` that it goes on.
        """
        spinner = itertools.cycle("|/-\\")
        heard, shown = "", 0.0

        def show(seconds: float, stage: str) -> None:
            nonlocal heard, shown
            if self.live:
                self._draw(f"{next(spinner)} {title}: {stage}, {seconds:.0f} s")
            elif stage != heard or seconds - shown >= EVERY_SECONDS:
                self.say(f"  {seconds:4.0f} s  {stage if stage != heard else '...'}")
                heard, shown = stage, seconds

        if not self.live:
            self.say(title)
        with self._cleared():
            yield show

    @contextlib.contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields ``step()``, to be called ``total`` times, from any thread."""
        lock, done = threading.Lock(), 0
        began = shown = time.monotonic()

        def step() -> None:
            nonlocal done, shown
            with lock:
                done += 1
                now = time.monotonic()
                if self.live:
                    self._draw(f"  {title}: {done} of {total}, {now - began:.0f} s")
                elif done == total or now - shown >= EVERY_SECONDS:
                    shown = now
                    self.say(f"  {title}: {done} of {total}")

        with self._cleared():
            yield step

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        with self._lock:
            self.stream.write(_CLEAR + text[:width])
            self.stream.flush()

    @contextlib.contextmanager
    def _cleared(self) -> Iterator[None]:
        """The live line is gone afterwards, whatever happens."""
        try:
            yield
        finally:
            if self.live:
                self._draw("")
