"""The tables at the end, from the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEADINGS = (
    *("serving", "load", "tok/s", "decode tok/s", "TTFT ms p50/p99", "TPOT ms p50/p99", "ITL ms p99"),
    *("running mean/peak", "retracted", "accept", "memory for"),
)
TURN_HEADINGS = (
    *("serving", "load", "tok/s", "turn", "TTFT ms p50/mean/p99", "prompt tokens", "cached", "of last turn"),
    *("computed", "running peak", "retracted"),
)


def tables(content: dict[str, Any]) -> list[str]:
    """One table a kind of load that there is in the record."""
    loads = [_row(entry, content["servers"][entry["server"]]) for entry in content["loads"]]
    turns = [row for entry in content["conversations"] for row in _turns(entry)]
    found = ((HEADINGS, loads), (TURN_HEADINGS, turns))
    return [_table(headings, rows) for headings, rows in found if rows]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (headings, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], ""])


def _row(entry: dict[str, Any], server: dict[str, Any]) -> Sequence[str]:
    """A load of bench_serving: servers in the order they ran."""
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


def _turns(entry: dict[str, Any]) -> list[Sequence[str]]:
    """A load of conversations: one row a turn."""
    seen, answers = entry["server_log"], entry["answers"]
    return [
        (
            entry["serving"],
            entry["load"],
            _number(answers["output_throughput"]),
            str(number),
            "/".join(_number(turn[f"{figure}_ttft_ms"], 0) for figure in ("median", "mean", "p99")),
            _number(turn["prompt_tokens"], 0),
            _number(turn["cached_tokens"]),
            "-" if turn["cached_share"] is None else f"{turn['cached_share']:.1%}",
            _number(turn["computed_tokens"]),
            _number(seen["running_peak"], 0),
            _number(seen["retractions"], 0),
        )
        for number, turn in enumerate(answers["turns"], start=1)
    ]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
