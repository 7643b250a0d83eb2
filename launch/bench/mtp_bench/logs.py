"""What a server's log says: memory at start; running requests, retractions and accept length under load."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLUSHED = "Cache flushed successfully"  # bench_serving flushes after its warm-up: the load begins there
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([0-9.]+), #queue-req: (\d+)")
_ACCEPT = re.compile(r"accept len: ([0-9.]+)")
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_STATE = re.compile(r"mamba-mtp state: (\{.*\})")
_SIZES = re.compile(r"max_total_num_tokens=(\d+).*?max_running_requests=(\d+).*?available_\w+_mem=([0-9.]+) GB")
_POOL = re.compile(r"Mamba Cache is allocated\. (.*)")
_POOL_SLOTS = re.compile(r"max_mamba_cache_size: (\d+)")
_POOL_GB = re.compile(r"(\w+) size: ([0-9.]+)GB")
_RING = re.compile(r"ReplaySSM ring buffers allocated.*")

#: Log text and what it means to who waits, latest last.
STAGES = (
    ("server_args=", "starting its processes"),
    ("Init torch distributed begin", "starting its processes"),
    ("Load weight begin", "making weights"),
    ("Load weight end", "allocating memory"),
    ("Mamba Cache is allocated", "allocating memory"),
    ("Capture", "capturing CUDA graphs"),
    ("max_total_num_tokens=", "warming up"),
    ("fired up", "answering"),
)


@dataclass(frozen=True)
class Decode:
    """One of SGLang's lines on decoding. accept: tokens a step and request, None without speculation."""

    running: int
    queued: int
    tokens_per_second: float
    accept: float | None


def decodes(text: str) -> list[Decode]:
    """Every line on decoding in ``text``."""
    found = []
    for line in text.splitlines():
        match = _DECODE.search(line)
        if match:
            accept = _ACCEPT.search(line)
            found.append(Decode(int(match[1]), int(match[3]), float(match[2]), float(accept[1]) if accept else None))
    return found


def under_load(text: str) -> dict[str, Any]:
    """What happened during one load, from the log it wrote.

    running_peak, running_mean: requests decoding together; queued_peak: requests waiting for memory or their turn;
    decode_tokens_per_second: median while at least nine tenths of the peak ran; retractions: requests put back for want
    of memory; accept_length: mean over the lines, None without speculation.
    """
    text = text.rpartition(FLUSHED)[2]
    lines = [line for line in decodes(text) if line.running]
    peak = max((line.running for line in lines), default=0)
    full = [line.tokens_per_second for line in lines if line.running >= 0.9 * peak]
    accepted = [line.accept for line in lines if line.accept is not None]
    return {
        "running_peak": peak or None,
        "running_mean": statistics.fmean(line.running for line in lines) if lines else None,
        "queued_peak": max((line.queued for line in lines), default=None),
        "decode_tokens_per_second": statistics.median(full) if full else None,
        "retractions": sum(map(int, _RETRACTED.findall(text))),
        "accept_length": statistics.fmean(accepted) if accepted else None,
        "decode_lines": len(lines),
    }


def at_start(text: str) -> dict[str, Any]:
    """What the server allocated, as SGLang and the plugin say.

    max_running_requests, max_total_tokens: what memory allows, by SGLang; state_slots and *_gb: SGLang's state pool, as
    the last such line says; plugin: the plugin's own report; lines: the lines themselves.
    """
    sizes = _SIZES.findall(text)
    pool = _POOL.findall(text)
    plugin = _STATE.findall(text)
    found: dict[str, Any] = {
        "max_total_tokens": int(sizes[-1][0]) if sizes else None,
        "max_running_requests": int(sizes[-1][1]) if sizes else None,
        "available_gb": float(sizes[-1][2]) if sizes else None,
        "state_slots": None,
        "state_gb": {},
        "plugin": json.loads(plugin[-1]) if plugin else None,
    }
    if pool:
        slots = _POOL_SLOTS.search(pool[-1])
        found["state_slots"] = int(slots[1]) if slots else None
        found["state_gb"] = {name: float(size) for name, size in _POOL_GB.findall(pool[-1])}
    found["lines"] = [line.strip() for line in pool + _RING.findall(text)] + [
        line[line.index("mamba-mtp") :] for line in text.splitlines() if "mamba-mtp" in line and "flag" not in line
    ]
    return found


def stage(text: str) -> str:
    """What a starting server is at."""
    reached = "importing"
    for mark, meaning in STAGES:
        if mark in text:
            reached = meaning
    return reached


def read(path: Path, begin: int = 0, end: int | None = None) -> str:
    """Bytes ``begin`` to ``end`` of a log that may still be written, as text; empty if there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else max(0, end - begin)).decode(errors="replace")
    except FileNotFoundError:
        return ""


def size(path: Path) -> int:
    """Its bytes so far."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail(path: Path, lines: int = 25) -> str:
    """The end of a log, headed by where it is."""
    return "\n".join([f"--- the end of {path}", *read(path).splitlines()[-lines:], "---"])
