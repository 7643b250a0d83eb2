"""Asks a server at intervals, for all pages that are open and while none is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .asking import Trouble
from .history import History, Row
from .reading import Sample, Served

#: Time that is kept, whatever the interval.
SECONDS_KEPT = 3600.0
#: Until a server that did not tell what it was started with is asked for that again.
PATIENCE = 60.0


class Source(Protocol):
    """Who is asked: `asking.Asked`."""

    url: str

    def sample(self) -> Sample: ...

    def served(self) -> Served: ...


@dataclass(frozen=True)
class View:
    """What a page shows.

    Attributes
        trouble: why the server says nothing now; "" while it does.
        sample, served: what it said last; None before it first did.
        rows, count: rows that the page does not have yet, and the number of the last of them.
        newest: the last row of all; {} before the first.
    """

    trouble: str
    sample: Sample | None
    served: Served
    rows: list[Row]
    count: int
    newest: Row


class Watcher:
    """Keeps the history of a server."""

    def __init__(self, source: Source, interval: float, clock: Callable[[], float] = time.time) -> None:
        """``interval`` in seconds."""
        self.source, self.interval = source, interval
        self.rows_kept = max(2, int(SECONDS_KEPT / interval))
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._history = History(self.rows_kept)
        self._trouble = "Not asked yet."
        self._sample: Sample | None = None
        self._served = Served()
        self._served_at = float("-inf")

    def look(self) -> None:
        """Ask once. What does not change while a server runs is asked when it is first seen, and seen again."""
        try:
            sample = self.source.sample()
            served = self._served_with(sample)
        except Exception as error:  # whatever is answered, the page goes on and says so
            trouble = str(error) if isinstance(error, Trouble) else f"The answer cannot be read: {error!r}"
            with self._lock:
                self._trouble = trouble
                self._history.gap(self._clock())
            return
        with self._lock:
            self._trouble, self._sample, self._served = "", sample, served
            self._history.add(self._clock(), sample)

    def _served_with(self, sample: Sample) -> Served:
        unknown = self._served == Served() and self._clock() > self._served_at + PATIENCE
        if not (unknown or self._trouble or self._started_again(sample)):
            return self._served
        self._served_at = self._clock()
        return self.source.served()

    def _started_again(self, sample: Sample) -> bool:
        """Between two readings: its counters are lower, or it says something else of itself."""
        before = self._sample
        if before is None or sample.labels != before.labels:
            return True
        return any(sample.values.get(name, 0) < before.values.get(name, 0) for name in ("verifies", "retracted"))

    def view(self, number: int) -> View:
        """Everything now, and the rows after row ``number``."""
        with self._lock:
            rows, newest = self._history.after(number), self._history.after(self._history.count - 1)
            last = newest[0] if newest else {}
            return View(self._trouble, self._sample, self._served, rows, self._history.count, last)

    def run(self) -> None:
        """Look at intervals until `stop`."""
        while True:
            began = time.monotonic()
            self.look()
            if self._ended.wait(max(0.0, self.interval - (time.monotonic() - began))):
                return

    def start(self) -> None:
        """`run` in a thread that ends with the process."""
        threading.Thread(target=self.run, name="watcher", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
