"""When to tell the operator that speculation costs more than it yields."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Log intervals in a row that must lose before anything is said.
PATIENCE = 3
#: Seconds between two warnings.
SILENCE = 600.0


class Losing:
    """Watches accept lengths against their break-even."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streak = 0
        self._quiet_until = float("-inf")

    def warning(self, accept_length: float, break_even: float, requests: float) -> str | None:
        """The warning to log after an interval of ``requests`` requests a step, if one is due."""
        self._streak = self._streak + 1 if accept_length < break_even else 0
        if self._streak < PATIENCE or self._clock() < self._quiet_until:
            return None
        self._quiet_until = self._clock() + SILENCE
        return (
            f"mamba-mtp: speculation seems to cost more than it yields: accept length {accept_length:.2f} over the "
            f"last {self._streak} log intervals, and at {requests:.0f} requests a step it takes about "
            f"{break_even:.2f} to be as fast as plain decoding (an estimate from the model's size). Lower "
            f"--speculative-num-draft-tokens, draft otherwise, or serve this load without speculation; "
            f"`python -m sglang_mamba_mtp.advise` shows what each would give. Said once in "
            f"{SILENCE / 60:.0f} minutes."
        )
