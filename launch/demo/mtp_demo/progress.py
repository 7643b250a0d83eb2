"""Progress people can see: a live line on a terminal, a plain line now and then elsewhere (CI logs)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Live

EVERY_SECONDS = 10.0
LINE_WIDTH = 90


class Progress:
    """Shows what the demo is waiting for on ``console``."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, title: str) -> Iterator[Callable[[float, str], None]]:
        """Yields ``show(seconds, line)``: how long it has taken, and the last thing heard."""
        if not self.console.is_terminal:
            self.say(title)
            shown, heard = 0.0, ""

            def show(seconds: float, line: str) -> None:
                nonlocal shown, heard
                if seconds - shown >= EVERY_SECONDS:
                    shown, news = seconds, "" if line == heard else f": {escape(line[:LINE_WIDTH])}"
                    heard = line
                    self.say(f"  {seconds:.0f} s{news}")

            yield show
            return
        heard = TextColumn("[dim]{task.fields[line]}")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), heard)
        with Live(*columns, console=self.console, transient=True) as live:
            task = live.add_task(title, total=None, line="")
            yield lambda seconds, line: live.update(task, line=escape(line[:LINE_WIDTH]))

    @contextlib.contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields ``step()``, to be called ``total`` times, from any thread."""
        if not self.console.is_terminal:
            lock, done, shown = threading.Lock(), 0, time.monotonic()

            def step() -> None:
                nonlocal done, shown
                with lock:
                    done += 1
                    if done == total or time.monotonic() - shown >= EVERY_SECONDS:
                        shown = time.monotonic()
                        self.say(f"  {title}: {done} of {total}")

            yield step
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Live(*columns, console=self.console, transient=True) as live:
            task = live.add_task(title, total=total)
            yield lambda: live.advance(task)
