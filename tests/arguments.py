"""Which server arguments a piece of code looks at, found by letting it look."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_mamba_mtp.guards import Decline


def arguments_read(decline: Iterable[Decline]) -> set[str]:
    """The server arguments that the guards look at, whatever the algorithm."""
    read: set[str] = set()

    class Recorder:
        def __init__(self, algorithm: str) -> None:
            self._algorithm = algorithm

        def __getattr__(self, name: str) -> object:
            read.add(name)
            return self._algorithm if name == "speculative_algorithm" else 1 if name != "page_size" else 64

    for guard in decline:
        for algorithm in ("EAGLE", "NGRAM"):
            guard.value(Recorder(algorithm))
    return read
