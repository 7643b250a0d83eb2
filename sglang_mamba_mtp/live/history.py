"""What a server said over time: levels as they were, rates of counters, gaps where it said nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from math import nan

from .reading import Sample

#: Rates are means of so many seconds: longer than SGLang's log intervals, at which most counters move.
RATE_SECONDS = 10.0
#: What a row has beside its time, in the units that are drawn; nan where it is not known.
COLUMNS = (
    "accept_length",
    "break_even",
    "throughput",
    "verified",
    "running",
    "waiting",
    "request_limit",
    "memory_request_limit",
    "retracted",
    "slots_used",
    "kv_used",
    "occupancy",
    "fullest",
    "folds",
    "settles",
    "tokens_a_fold",
)
_COUNTERS = ("verifies", "committed_tokens", "folds", "folded_tokens", "settles")
_LEVELS = {name: name for name in ("throughput", "running", "waiting", "request_limit", "memory_request_limit")} | {
    "break_even": "break_even_accept_length"
}
_SHARES = {"slots_used": "slots_used", "kv_used": "kv_used", "occupancy": "window_occupancy"}

Row = Mapping[str, float]


def increase(before: float, now: float) -> float:
    """What was counted between two readings of a counter; one that is lower began again at 0."""
    return now - before if now >= before else now


class Rates:
    """Increases of counters over the last `RATE_SECONDS`."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, float]]] = deque()

    def clear(self) -> None:
        """Forget all: the time since was not seen."""
        self._readings.clear()

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """A reading, at ``time`` seconds."""
        self._readings.append((time, values))
        while len(self._readings) > 2 and self._readings[1][0] <= time - RATE_SECONDS:
            self._readings.popleft()

    @property
    def seconds(self) -> float:
        """Between the oldest reading and the newest; 0 with fewer than two."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def increase(self, name: str) -> float:
        """Of one counter; nan where it, or the time, is not known."""
        numbers = [values[name] for _, values in self._readings if name in values]
        if len(numbers) < 2:
            return nan
        return sum(increase(before, now) for before, now in pairwise(numbers))

    def rate(self, name: str) -> float:
        """A second."""
        return self.increase(name) / self.seconds if self.seconds > 0 else nan


class History:
    """The newest rows, numbered from 1 on."""

    def __init__(self, rows: int) -> None:
        """Keeps ``rows`` rows."""
        self.count = 0
        self._rows: deque[Row] = deque(maxlen=rows)
        self._rates = Rates()
        self._retracted = 0.0
        self._retracted_before: float | None = None

    def after(self, number: int) -> list[Row]:
        """The rows after row ``number``, of those that are kept."""
        new = min(self.count - max(0, number), len(self._rows))
        return list(self._rows)[len(self._rows) - new :]

    def gap(self, time: float) -> None:
        """Nothing was said at ``time``."""
        self._rates.clear()
        self._append({"time": time, **dict.fromkeys(COLUMNS, nan)})

    def add(self, time: float, sample: Sample) -> None:
        """``sample`` was read at ``time``, seconds since the epoch."""
        values = sample.values
        self._rates.add(time, {name: values[name] for name in _COUNTERS if name in values})
        row = {"time": time, **dict.fromkeys(COLUMNS, nan)}
        row.update({column: values.get(name, nan) for column, name in _LEVELS.items()})
        row.update({column: 100 * values.get(name, nan) for column, name in _SHARES.items()})
        row["accept_length"] = self._accept_length(values)
        row["verified"] = self._rates.rate("committed_tokens")
        row["retracted"] = self._retractions(values)
        row["folds"], row["settles"] = self._rates.rate("folds"), self._rates.rate("settles")
        row["tokens_a_fold"] = _share(self._rates.increase("folded_tokens"), self._rates.increase("folds"))
        row["fullest"] = 100 * _share(values.get("pending_tokens_max", nan), values.get("window_tokens", nan))
        self._append(row)

    def _append(self, row: Row) -> None:
        self._rows.append(row)
        self.count += 1

    def _accept_length(self, values: Mapping[str, float]) -> float:
        """Of the verifies of the last seconds; without the plugin's counters SGLang's, which is 0 without verifies."""
        if "verifies" in values:
            return _share(self._rates.increase("committed_tokens"), self._rates.increase("verifies"))
        return values.get("accept_length") or nan

    def _retractions(self, values: Mapping[str, float]) -> float:
        """Since the page's first reading."""
        now = values.get("retracted")
        if now is None:
            return nan
        if self._retracted_before is not None:
            self._retracted += increase(self._retracted_before, now)
        self._retracted_before = now
        return self._retracted


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else nan
