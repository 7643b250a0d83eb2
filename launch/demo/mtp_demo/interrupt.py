"""Ctrl-C and its kin: unwind once, so that servers are stopped and what is known is written."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the program to end. name: ``SIGINT``, ...; status: the exit status, as a shell would report it."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.status = 128 + number
        super().__init__(f"interrupted by {self.name}" + (" (Ctrl-C)" if number == signal.SIGINT else ""))


def catch() -> None:
    """From now on the first such signal raises `Interrupted` in the main thread; further ones are ignored, as they
    would cut the clean-up short (it takes no longer than `server.STOP_SECONDS` and a kill)."""
    for number in SIGNALS:
        signal.signal(number, _raise)


def _raise(number: int, frame: object) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)
