"""What the page says in words, as HTML. All that a server told is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from math import isnan, nan

from .. import __version__
from . import charts
from .charts import size_text
from .history import Row
from .reading import Sample, Served
from .watching import View

STYLE = """
:host { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #23272e; display: block; width: 100%; }
:host > div { width: 100%; }
.head { display: flex; align-items: baseline; gap: 2px 14px; flex-wrap: wrap; font-size: 13px; }
.head b { font-size: 18px; }
.head .dot { width: 10px; height: 10px; border-radius: 5px; align-self: center; }
.head .fact { color: #5c636e; } .head .fact i { color: #23272e; font-style: normal; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: 10px; }
.tile { background: #f5f6f8; border-radius: 6px; padding: 6px 12px 7px; }
.tile .name { font-size: 12px; color: #5c636e; } .tile .number { font-size: 24px; font-weight: 600; line-height: 1.25; }
.tile .more { font-size: 12px; color: #5c636e; min-height: 15px; }
.trouble, .note { border-radius: 6px; padding: 8px 12px; font-size: 14px; margin-bottom: 8px; }
.trouble { background: #fdecea; border-left: 4px solid #c93838; }
.note { background: #fff5e2; border-left: 4px solid #e07b1a; }
"""

UNKNOWN = "\N{EN DASH}"
NO_PLUGIN = (
    "The server exports no sglang_mamba_mtp_* metrics: it runs without speculation, with --mamba-mtp-mode off, or "
    "without the plugin. Shown is what SGLang itself exports."
)


def head(url: str, view: View) -> str:
    """What is served where, and whether it answers."""
    colour, state = ("#c93838", "not answering") if view.trouble else ("#2a9254", "answering")
    facts = "".join(f'<span class="fact">{name} <i>{escape(text)}</i></span>' for name, text in _facts(url, view))
    return (
        f'<div class="head"><span class="dot" style="background:{colour}" title="{state}"></span>'
        f"<b>mamba-mtp live</b>{facts}</div>"
    )


def _facts(url: str, view: View) -> Iterator[tuple[str, str]]:
    yield "server", url
    labels = view.sample.labels if view.sample is not None else {}
    versions = {"plugin": labels.get("plugin_version", ""), "SGLang": view.served.sglang_version}
    facts = {
        "model": (view.served.model or labels.get("model_name", "")).rstrip("/").rpartition("/")[2],
        "mode": labels.get("mode", ""),
        "family": labels.get("family", ""),
        "radix": view.served.radix,
        "drafts": view.served.drafts,
        **versions,
    }
    for name, text in facts.items():
        if text:
            yield name, text
    if versions["plugin"] not in ("", __version__):
        yield "this page", __version__


def message(view: View) -> str:
    """What stands in the way of showing everything; "" if nothing does."""
    if view.trouble:
        return f'<div class="trouble">{escape(view.trouble)}</div>'
    if view.sample is not None and not view.sample.has_plugin:
        return f'<div class="note">{escape(NO_PLUGIN)}</div>'
    return ""


def tiles(view: View) -> str:
    """The newest numbers, large; those from before an outage are gone."""
    row = view.newest if not view.trouble else {}
    values = view.sample.values if view.sample is not None and not view.trouble else {}
    tile = (
        '<div class="tile"><div class="name">{}</div><div class="number" data-value="{}">{}</div>'
        '<div class="more">{}</div></div>'
    )
    cells = (tile.format(name, name, escape(number), escape(more)) for name, number, more in _tiles(row, values))
    return f'<div class="tiles">{"".join(cells)}</div>'


def _tiles(row: Row, values: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """Name, number, and a line on it."""

    def now(column: str, decimals: int = 0) -> str:
        return _number(row.get(column, nan), decimals)

    def fact(name: str, before: str, after: str) -> str:
        return f"{before}{values[name]:,.0f}{after}" if name in values else ""

    even = row.get("break_even", nan)
    idle = "no verify in the last 10 s" if row and isnan(row["accept_length"]) else ""
    yield "accept length", now("accept_length", 2), idle or ("" if isnan(even) else f"break-even {even:.2f}")
    verified = "" if isnan(row.get("verified", nan)) else f"{now('verified')} from verifies"
    yield "generated tokens/s", now("throughput"), verified
    yield "requests running", now("running"), fact("request_limit", "of at most ", "")
    yield "requests waiting", now("waiting"), fact("memory_request_limit", "state slots allow ", " running")
    yield "retracted", now("retracted"), fact("retracted", "", " since the server's start")
    held, stock = values.get("speculative_bytes"), values.get("stock_speculative_bytes")
    if held is None or stock is None:
        yield "held for speculation", UNKNOWN, ""
    else:
        yield (
            "held for speculation",
            size_text(held),
            f"{size_text(abs(stock - held))} {'less' if held <= stock else 'more'} than SGLang's",
        )


def _number(value: float, decimals: int) -> str:
    return UNKNOWN if isnan(value) else f"{value:,.{decimals}f}"


def sizes(sample: Sample, served: Served) -> list[tuple[str, float, str]]:
    """Kind, bytes on a rank and colour; last what SGLang's own verify would hold in place of what is held for it."""
    values = sample.values
    found = []
    if {"slot_bytes", "state_slots"} <= values.keys():
        size = values["slot_bytes"] * values["state_slots"]
        found.append((f"{values['state_slots']:,.0f} state slots", size, charts.BLUE))
    found += [(kind, float(size), charts.GREEN) for kind, size in served.parts.items()]
    if not served.parts and "speculative_bytes" in values:
        found.append(("speculation", values["speculative_bytes"], charts.GREEN))
    if "stock_speculative_bytes" in values:
        found.append(("SGLang's verify", values["stock_speculative_bytes"], charts.GREY))
    return found
