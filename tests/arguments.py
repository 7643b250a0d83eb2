"""Which server arguments a piece of code looks at, found by letting it look."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_mamba_mtp.guards import Decline

#: What the others are looked at for; any argument not named here is 1.
VALUES = {"page_size": 64, "speculative_adaptive_config": None}


def arguments_read(decline: Iterable[Decline]) -> set[str]:
    """The server arguments that the guards look at, whatever the algorithm."""
    read: set[str] = set()

    class Recorder:
        def __init__(self, algorithm: str) -> None:
            self._algorithm = algorithm

        def __getattr__(self, name: str) -> object:
            read.add(name)
            return VALUES.get(name, self._algorithm if name == "speculative_algorithm" else 1)

    for guard in decline:
        for algorithm in ("EAGLE", "NGRAM"):
            guard.value(Recorder(algorithm))
    return read
