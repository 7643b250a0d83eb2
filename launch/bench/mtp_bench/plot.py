"""The plots of a record: output tokens/s against requests at once, and how many requests run in the same memory.

``python plot.py record.json`` writes record-throughput.png and record-requests.png beside it. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: One colour a mode, in every plot.
COLOURS = {
    "none": "#7f7f7f",
    "stock": "#d62728",
    "replayssm": "#ff7f0e",
    "snapshot": "#9467bd",
    "slots": "#1f77b4",
    "replay": "#2ca02c",
    "rewind": "#006400",
}
STYLES = ("-", "--", ":", "-.")


def draw(path: Path) -> list[Path]:
    """Write the PNGs of the record at ``path``; returns what was written: none for a record without loads."""
    import matplotlib

    matplotlib.use("Agg")
    content = json.loads(path.read_text())
    written = []
    for name, plot in (("throughput", _throughput), ("requests", _requests)):
        figure = plot(content)
        if figure is not None:
            written.append(path.with_name(f"{path.stem}-{name}.png"))
            figure.savefig(written[-1], dpi=150, bbox_inches="tight")
    return written


def conditions(content: dict[str, Any]) -> str:
    """One line under a title: what was measured on what."""
    settings, device = content["settings"], content["device"]
    where = device.get("gpu") or device.get("cpu") or device["kind"]
    if device["kind"] == "cuda" and settings["tp"] > 1:
        where = f"{settings['tp']} x {where}"
    weights = "random weights, " if settings["shape"] else ""
    accept = settings["simulated_accept_length"]
    accepting = f", simulated accept length {accept:g}" if accept is not None else ""
    return (
        f"{where}, SGLang {content['versions']['sglang']}, {weights}{settings['input_len']} tokens in, "
        f"{settings['output_len']} out{accepting}"
    )


def series(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Loads of a fixed concurrency by server, in the modes' order, each sorted by concurrency."""
    modes = list(content["modes"])
    loads = [entry for entry in content["loads"] if entry["concurrency"] is not None]
    loads.sort(key=lambda entry: (modes.index(entry["mode"]), entry["draft"] or "", entry["concurrency"]))
    grouped: dict[str, list[dict[str, Any]]] = {}
    for entry in loads:
        grouped.setdefault(entry["serving"], []).append(entry)
    return grouped


def label(content: dict[str, Any], entry: dict[str, Any]) -> str:
    """A mode's title, with the drafts where a record has several."""
    drafts = {load["draft"] for load in content["loads"] if load["draft"]}
    title = content["modes"][entry["mode"]]
    return f"{title}, {entry['draft']}" if entry["draft"] and len(drafts) > 1 else title


def _throughput(content: dict[str, Any]) -> Any:
    import matplotlib.pyplot as plt

    grouped = series(content)
    if not grouped:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.5))
    drafts = sorted({entry["draft"] or "" for loads in grouped.values() for entry in loads} - {""})
    for loads in grouped.values():
        first = loads[0]
        style = STYLES[drafts.index(first["draft"]) % len(STYLES)] if first["draft"] else "-"
        requests = [entry["concurrency"] for entry in loads]
        speed = [entry["bench_serving"]["output_throughput"] for entry in loads]
        axes.plot(requests, speed, style, marker="o", color=COLOURS[first["mode"]], label=label(content, first))
    axes.set_xscale("log", base=2)
    ticks = sorted({entry["concurrency"] for loads in grouped.values() for entry in loads})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("output tokens/s")
    axes.grid(alpha=0.3)
    axes.legend()
    _head(axes, content)
    return figure


def _requests(content: dict[str, Any]) -> Any:
    """Bars: requests that ran together at the highest load, at most what was asked for."""
    import matplotlib.pyplot as plt

    grouped = series(content)
    if not grouped:
        return None
    last = [loads[-1] for loads in grouped.values()]
    asked = max(entry["concurrency"] for entry in last)
    last = [entry for entry in last if entry["concurrency"] == asked]
    figure, axes = plt.subplots(figsize=(7, 0.6 * len(last) + 1.2))
    names = [label(content, entry) for entry in last]
    running = [entry["server_log"]["running_peak"] or 0 for entry in last]
    bars = axes.barh(range(len(last)), running, color=[COLOURS[entry["mode"]] for entry in last])
    axes.bar_label(bars, padding=3)
    axes.set_yticks(range(len(last)), names)
    axes.invert_yaxis()
    axes.axvline(asked, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"requests running together in the same memory ({asked} asked for)")
    _head(axes, content)
    return figure


def _head(axes: Any, content: dict[str, Any]) -> None:
    axes.set_title(f"{content['settings']['model']}\n{conditions(content)}", fontsize=9)


if __name__ == "__main__":
    for png in draw(Path(sys.argv[1])):
        print(png)
