"""What the scheduler has decided about slots and the device has yet to do.

With overlap scheduling the scheduler learns that a request has ended while the next verify, which still includes that
request, is at work on the device. What it then decides about the request's slot must not run beside that verify, nor
before its commit, so it is put here, and done at the head of the next forward, on the forward's stream, before anything
else looks at a slot (`state.pools.RewindPool.catch_up`):

    verify t         commit t
    verify t+1       commit t+1          the scheduler sees the end at t, gives the slot away: put here;
                                         the slot may be copied from or taken by another request: decided
    forward t+2      catch up, then SGLang's own copies and clears of slots, then the forward

Only the scheduler's thread puts and takes. Order is kept: SGLang's copies and clears, decided later, run later.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .upload import upload


class SlotQueue:
    """Slots to be brought back to a length, in the order in which that was decided."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._waiting: list[tuple[torch.Tensor, int]] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, slot: torch.Tensor, length: int) -> None:
        """``slot`` (0-dim, on the device) is to hold the state after ``length`` tokens."""
        self._waiting.append((slot.reshape(()), length))

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [n] int64 and lengths [n] int64 on the device, without waiting for it; the queue is empty then."""
        slots, lengths = zip(*self._waiting, strict=True)
        if self._device.type == "cuda":
            # they were allocated on the scheduler's stream, which would give their memory to others before it is read
            for slot in slots:
                slot.record_stream(torch.cuda.current_stream(self._device))
        self.forget()
        return torch.stack(slots).to(torch.int64), upload(lengths, torch.int64, self._device)

    def forget(self) -> None:
        """All slots are free: nothing that was decided about them counts any more."""
        self._waiting.clear()
