"""What a server was started with: settled before its first forward, the same until it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..compat import startup, version


@dataclass(frozen=True)
class Facts:
    """Bytes are for all layers of this rank.

    Attributes
        mode, family: what is served, for people.
        parts: bytes held for speculation, by what they hold.
        stock_bytes: what SGLang's own verify would hold for as many request rows and the longest draft.
        request_rows: rows of the request pool, padding included.
        slot_bytes: recurrent and convolution states of one slot.
        state_slots: slots that requests and the prefix cache share.
        slots_gained: how many of them SGLang's own verify would not have had; None where the number was given.
        slots_per_request: how many are reserved for a running request.
        request_limit: the most requests that run at a time.
        radix: how the radix cache gets its states, for people.
    """

    mode: str
    family: str
    parts: Mapping[str, int]
    stock_bytes: int
    request_rows: int
    slot_bytes: int
    state_slots: int
    slots_gained: int | None
    slots_per_request: int
    request_limit: int
    radix: str

    @property
    def speculative_bytes(self) -> int:
        """Bytes held for speculation beside the slots."""
        return sum(self.parts.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes SGLang's own verify would have held more; below 0 where it would have held fewer."""
        return self.stock_bytes - self.speculative_bytes

    @property
    def memory_limit(self) -> int:
        """Requests there are state slots for."""
        return self.state_slots // self.slots_per_request

    def report(self) -> dict[str, Any]:
        """For programs."""
        return {
            "mode": self.mode,
            "family": self.family,
            "speculative_bytes": self.speculative_bytes,
            "parts": dict(self.parts),
            "request_rows": self.request_rows,
            "stock_bytes": self.stock_bytes,
            "saved_bytes": self.saved_bytes,
            "slot_bytes": self.slot_bytes,
            "state_slots": self.state_slots,
            "slots_gained": self.slots_gained,
            "slots_per_request": self.slots_per_request,
            "request_limit": self.request_limit,
            "memory_limit": self.memory_limit,
            "radix": self.radix,
        }

    def line(self) -> str:
        """The line a server starts with. People read up to the bar, programs what follows it."""
        detail = ", ".join(f"{name} {_mib(size)}" for name, size in self.parts.items())
        gained = "" if not self.slots_gained else f" ({self.slots_gained:+d})"
        return (
            f"mamba-mtp {__version__}: mode {self.mode}, {self.family} model, speculative state "
            f"{_mib(self.speculative_bytes)}{f' ({detail})' if detail else ''} where SGLang's own verify takes "
            f"{_mib(self.stock_bytes)}, {self.state_slots} state slots{gained}, up to {self.request_limit} requests "
            f"({self.slots_per_request} slots each), radix {self.radix}, "
            f"SGLang {version.sglang_version()} | mamba-mtp state: {json.dumps(self.report())}"
        )


def facts_of(
    runner: Any, *, mode: str, family: str, parts: Mapping[str, int], slots_gained: int | None, radix: str
) -> Facts:
    """The facts of a `ModelRunner` whose pools are built."""
    request_pool = runner.req_to_token_pool
    cache = request_pool.mamba_pool.mamba_cache
    rows = request_pool.req_to_token.shape[0]
    slot_bytes = sum(states.nbytes // states.shape[1] for states in (cache.temporal, *cache.conv))
    return Facts(
        mode=mode,
        family=family,
        parts=parts,
        stock_bytes=slot_bytes * rows * startup.largest_draft(runner.server_args),
        request_rows=rows,
        slot_bytes=slot_bytes,
        state_slots=request_pool.mamba_pool.size,
        slots_gained=slots_gained,
        slots_per_request=startup.slots_per_request(runner),
        request_limit=int(runner.max_running_requests),
        radix=radix,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
