"""Numbers that come from the device without anybody waiting for them."""

from __future__ import annotations

from typing import Any

import torch


class Reading:
    """A few integers of the device, copied to the host behind what the current stream has been given.

    `request` starts a copy and `newest` returns the last one that has arrived, which is the one before as a rule: what
    is read is as old as the time between two requests. On a CPU a copy has arrived when `request` returns.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """``size`` integers (int64) of ``device``."""
        self._on_device = device.type != "cpu"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=self._on_device)
        self._arrival: Any = None
        self._source: torch.Tensor | None = None
        self._values: list[int] | None = None

    def request(self, values: torch.Tensor) -> None:
        """Start copying ``values`` [size] int64; does nothing while an earlier copy is under way."""
        if not self._take():
            return
        self._host.copy_(values, non_blocking=self._on_device)
        self._source = values  # kept until the copy has arrived
        if self._on_device:
            self._arrival = torch.get_device_module(values.device).Event()
            self._arrival.record()
        else:
            self._take()

    def newest(self) -> list[int] | None:
        """The values that have arrived last; None before the first."""
        self._take()
        return self._values

    def _take(self) -> bool:
        """Take over what has arrived; whether nothing is under way any more."""
        if self._source is None:
            return True
        if self._arrival is not None and not self._arrival.query():
            return False
        self._values, self._source, self._arrival = self._host.tolist(), None, None
        return True
