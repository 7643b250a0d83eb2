"""The charts of the page as data, and how one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bokeh.models import (
    ColumnDataSource,
    DatetimeTickFormatter,
    FactorRange,
    HoverTool,
    Legend,
    LegendItem,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#1f6fb4", "#e07b1a", "#2a9254", "#c93838", "#7a56b0", "#8a8f98"
INK, FAINT = "#3b4048", "#e6e8ec"
HEIGHT = 226
_LEFT = 48  # pixels for the numbers of an axis, the same for all so that figures stand below each other


@dataclass(frozen=True)
class Line:
    """A column of `history.COLUMNS`, and how it looks."""

    column: str
    label: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A figure over time.

    Attributes
        top: the least its axis reaches to; what is drawn may reach higher.
        tick, tip: how its axis and its tips write numbers (numbro's format).
    """

    title: str
    lines: tuple[Line, ...]
    top: float
    tick: str = "0,0.[0]"
    tip: str = "0,0.0"


ACCEPT_LENGTH = Chart(
    "Accept length (tokens a verify yields a request)",
    (Line("accept_length", "accept length", BLUE), Line("break_even", "break-even (estimate)", ORANGE, "dashed")),
    top=2,
    tip="0,0.00",
)
THROUGHPUT = Chart(
    "Generated tokens per second",
    (Line("throughput", "last log interval", BLUE), Line("verified", "from verifies, 10 s mean", GREEN)),
    top=10,
)
REQUESTS = Chart(
    "Requests",
    (
        Line("running", "running", BLUE),
        Line("waiting", "waiting", ORANGE),
        Line("request_limit", "limit", GREY, "dashed"),
        Line("memory_request_limit", "state slots allow", PURPLE, "dotted"),
    ),
    top=2,
    tick="0,0",
    tip="0,0",
)
RETRACTIONS = Chart(
    "Retracted requests (since this page was started)",
    (Line("retracted", "sent back to wait for memory", RED),),
    top=4,
    tick="0,0",
    tip="0,0",
)
IN_USE = Chart(
    "Pools in use (%)", (Line("slots_used", "state slots", BLUE), Line("kv_used", "KV tokens", GREEN)), top=100
)
OCCUPANCY = Chart(
    "Window occupancy (%)",
    (Line("occupancy", "all running requests", BLUE), Line("fullest", "fullest window", ORANGE, "dashed")),
    top=100,
)
FOLDS = Chart(
    "Folds per second", (Line("folds", "by verifies", BLUE), Line("settles", "settles", ORANGE)), top=1, tick="0,0.[00]"
)
FOLDED = Chart("Tokens a fold writes into a state", (Line("tokens_a_fold", "10 s mean", BLUE),), top=4)

#: Every server has these,
ALWAYS = (ACCEPT_LENGTH, THROUGHPUT, REQUESTS, RETRACTIONS, IN_USE)
#: and those that keep windows these too.
WINDOWS = (OCCUPANCY, FOLDS, FOLDED)


def draw(chart: Chart, source: ColumnDataSource, times: Range1d) -> figure:
    """The figure of ``chart`` over ``source``, whose columns are `history.COLUMNS` and ``time`` (ms)."""
    plot = _bare(chart.title, x_range=times, y_range=Range1d(0, chart.top), x_axis_type="datetime")
    items = []
    for line in chart.lines:
        glyph = plot.line("time", line.column, source=source, line_width=2)
        glyph.glyph.update(line_color=line.colour, line_dash=line.dash)
        items.append(LegendItem(label=line.label, renderers=[glyph]))
    tips = [("", "@time{%H:%M:%S}")]
    tips += [(line.label, f"@{line.column}{{{chart.tip}}}") for line in chart.lines]
    first = plot.renderers[0]  # its tip has the numbers of all
    plot.add_tools(HoverTool(tooltips=tips, formatters={"@time": "datetime"}, mode="vline", renderers=[first]))
    _legend(plot, items, glyph_width=16, click_policy="hide")
    fine, coarse = "%H:%M:%S", "%H:%M"
    plot.xaxis.formatter = DatetimeTickFormatter(seconds=fine, minsec=fine, minutes=coarse, hourmin=coarse)
    plot.xaxis.ticker.desired_num_ticks = 4
    plot.yaxis.formatter = NumeralTickFormatter(format=chart.tick)
    plot.yaxis.ticker.desired_num_ticks = 4
    return plot


def show_until(plot: figure, top: float) -> None:
    """Let the axis end at ``top`` and begin so far below 0 that a line at 0 is seen."""
    plot.y_range.update(start=-0.02 * top, end=top)


def highest(chart: Chart, source: ColumnDataSource, since: float) -> float:
    """Where the axis of ``chart`` ends so that all from ``since`` (ms) on is seen."""
    times = source.data["time"]
    first = next((index for index, time in enumerate(times) if time >= since), len(times))
    drawn = (value for line in chart.lines for value in source.data[line.column][first:] if value == value)
    return max(chart.top, 1.08 * max(drawn, default=0.0))


def draw_sizes(source: ColumnDataSource) -> figure:
    """Bars of bytes: columns ``kind``, ``bytes``, ``text`` and ``colour`` of ``source``."""
    plot = _bare("Memory by kind (on each rank)", x_range=Range1d(0, 1), y_range=FactorRange())
    plot.min_border_left = 120
    plot.hbar(y="kind", right="bytes", height=0.62, source=source, color="colour")
    texts = plot.text(x="bytes", y="kind", text="text", source=source, x_offset=6, text_baseline="middle")
    texts.glyph.update(text_font_size="12px", text_color=INK)
    _legend(plot, [LegendItem(label="grey: what SGLang's own verify would hold")], glyph_width=0, label_standoff=0)
    plot.xaxis.visible = False
    plot.grid.visible = False
    plot.yaxis.major_tick_line_color = None
    plot.yaxis.major_label_text_font_size = "12px"
    return plot


def show_sizes(plot: figure, source: ColumnDataSource, bars: Sequence[tuple[str, float, str]]) -> None:
    """Let ``plot`` show ``bars`` (kind, bytes, colour), the first on top; grey is what is not held."""
    kinds, sizes, colours = (list(column) for column in zip(*bars, strict=True))
    texts = [size_text(size) + (", not held" if colour == GREY else "") for _, size, colour in bars]
    data = {"kind": kinds, "bytes": sizes, "text": texts, "colour": colours}
    if data == source.data:
        return
    plot.y_range.factors = kinds[::-1]
    plot.x_range.end = 1.65 * max(*sizes, 1)
    source.data = data


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} B"


def _legend(plot: figure, items: Sequence[LegendItem], **options: object) -> None:
    legend = Legend(items=list(items), orientation="horizontal", location="top_left", border_line_color=None, **options)
    legend.update(label_text_font_size="11px", label_text_color=INK, padding=0, margin=2, spacing=12)
    plot.add_layout(legend, "above")


def _bare(title: str, **options: object) -> figure:
    plot = figure(title=title, height=HEIGHT, sizing_mode="stretch_width", toolbar_location=None, tools="", **options)
    plot.title.update(text_font_size="13px", text_color=INK, text_font_style="bold")
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.update(axis_line_color=FAINT, major_tick_line_color=FAINT, minor_tick_line_color=None)
        axis.update(major_label_text_color=INK, major_label_text_font_size="11px")
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = FAINT
    plot.update(outline_line_color=None, border_fill_color="white", min_border_left=_LEFT, min_border_right=14)
    return plot
