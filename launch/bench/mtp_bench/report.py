"""The table at the end, from the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEADINGS = (
    *("serving", "load", "tok/s", "decode tok/s", "TTFT ms p50/p99", "TPOT ms p50/p99", "ITL ms p99"),
    *("running mean/peak", "retracted", "accept", "memory for"),
)


def table(content: dict[str, Any]) -> str:
    """One row a load, servers in the order they ran."""
    rows = [HEADINGS, *(_row(entry, content["servers"][entry["server"]]) for entry in content["loads"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _row(entry: dict[str, Any], server: dict[str, Any]) -> Sequence[str]:
    seen, client = entry["server_log"], entry["bench_serving"]
    return (
        entry["serving"],
        entry["load"],
        _number(client["output_throughput"]),
        _number(seen["decode_tokens_per_second"]),
        f"{_number(client['median_ttft_ms'], 0)}/{_number(client['p99_ttft_ms'], 0)}",
        f"{_number(client['median_tpot_ms'], 2)}/{_number(client['p99_tpot_ms'], 2)}",
        _number(client["p99_itl_ms"], 2),
        f"{_number(seen['running_mean'])}/{_number(seen['running_peak'], 0)}",
        _number(seen["retractions"], 0),
        _number(seen["accept_length"], 2),
        _number(server["max_running_requests"], 0),
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
