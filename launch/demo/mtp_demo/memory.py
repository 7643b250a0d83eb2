"""Bytes of speculative state, as the plugin logs them when a server starts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_ANNOUNCED = re.compile(r"mamba-mtp \d\S*: (.+?)(?: \| mamba-mtp state: .*)?$", re.MULTILINE)
_STATE = re.compile(r"mamba-mtp state: (\{.*\})")
_MIB = re.compile(r"speculative state ([0-9.]+) MiB")


@dataclass(frozen=True)
class SpeculativeState:
    """What a server holds for speculation beside the recurrent states themselves (bytes; None: not told).

    total: allocated; per_request: its share of one running request; stock_total: what SGLang's own verify would take;
    exact: told to the byte, not rounded to 0.1 MiB.
    """

    mode: str
    total: int | None
    per_request: int | None
    stock_total: int | None
    exact: bool


def announced(log: str) -> str | None:
    """What the plugin says at start (mode, model kind, allocation), or None if it was not loaded."""
    found = _ANNOUNCED.findall(log)
    return found[-1].strip() if found else None


#: What a server without speculation holds for it.
NOTHING = SpeculativeState("none", 0, 0, 0, True)


def speculative_state(log: str, running_requests: int | None) -> SpeculativeState | None:
    """Read the line that a server with speculation starts with; None if there is none.

    ``running_requests`` (of /server_info) shares out a total where no rows are told.
    """
    line = announced(log)
    if line is None:
        return None
    found = _STATE.findall(log)
    if found:
        told = json.loads(found[-1])
        rows = told.get("request_rows") or (running_requests + 1 if running_requests else None)
        total = told["speculative_bytes"]
        return SpeculativeState(told["mode"], total, total // rows if rows else None, told.get("stock_bytes"), True)
    mode = re.match(r"mode (\w+)", line)
    mib = _MIB.search(line)
    total = round(float(mib[1]) * 2**20) if mib else None
    rows = running_requests + 1 if running_requests else None
    name = mode[1] if mode else "none"
    stock = total if name == "snapshot" else None
    return SpeculativeState(name, total, total // rows if rows and total is not None else None, stock, False)
