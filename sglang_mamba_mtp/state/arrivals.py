"""Slots of a decode server between their last owner and the state of the next, which a prefill server writes.

It writes when it likes, on no stream of this server. A request that ends may be in one verify more, launched before
its end was seen, which may fold into its slot or write a snapshot's: either is promised to a prefill server only when
that is done.
"""

from __future__ import annotations

from typing import Any

import torch


class Arrivals:
    """Slots that were given up while forwards that know them may be at work."""

    def __init__(self) -> None:
        self._given_up: list[tuple[torch.Tensor, Any]] = []

    def given_up(self, slots: torch.Tensor, forwards: Any) -> None:
        """The owner of ``slots`` [n] is gone; ``forwards`` is the stream of all forwards so far, or None: they are
        done when they were launched."""
        if forwards is None:
            return
        self._forget_what_is_done()
        done = torch.get_device_module(slots.device).Event()
        done.record(forwards)
        self._given_up.append((slots, done))

    def wait_for(self, slot: torch.Tensor) -> None:
        """Returns when no forward writes ``slot`` (0-dim) any more. Slots are taken in the order in which they were
        given up, so there is something to wait for only where there are hardly more than run."""
        self._forget_what_is_done()
        for slots, done in self._given_up:
            if int(slot) in slots.tolist():
                done.synchronize()

    def _forget_what_is_done(self) -> None:
        self._given_up = [entry for entry in self._given_up if not entry[1].query()]
