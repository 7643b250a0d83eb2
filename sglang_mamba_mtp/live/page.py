"""One browser's page: a Bokeh document that takes up what the watcher has new."""

from __future__ import annotations

import time
from datetime import datetime
from functools import partial

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, Div, InlineStyleSheet, RadioButtonGroup, Range1d

from . import charts, words
from .history import COLUMNS
from .watching import View, Watcher

#: Minutes that can be seen at once.
SPANS = (1, 5, 15, 60)
TITLE = "mamba-mtp live"


class Page:
    """The document's models, and how they change."""

    def __init__(self, document: Document, watcher: Watcher) -> None:
        self._watcher = watcher
        self._count = 0
        style = InlineStyleSheet(css=words.STYLE)
        div = partial(Div, stylesheets=[style], sizing_mode="stretch_width")
        self._head, self._summary = div(), div()
        self._span = RadioButtonGroup(labels=[f"{minutes} min" for minutes in SPANS], active=1, width=260, height=28)
        self._span.on_change("active", lambda name, old, new: self.update())
        self._rows = ColumnDataSource({"time": [], **{name: [] for name in COLUMNS}})
        self._sizes = ColumnDataSource({"kind": [], "bytes": [], "text": [], "colour": []})
        self._times = Range1d()
        self._plots = {
            chart: charts.draw(chart, self._rows, self._times) for chart in (*charts.ALWAYS, *charts.WINDOWS)
        }
        self._memory = charts.draw_sizes(self._sizes)
        plots = [self._plots[chart] for chart in charts.ALWAYS]
        wide = {"sizing_mode": "stretch_width"}
        self._windows = row([self._plots[chart] for chart in charts.WINDOWS], visible=False, **wide)
        document.title = TITLE
        document.add_root(
            column(
                row(self._head, self._span, **wide),
                self._summary,
                row(plots[:3], **wide),
                row(*plots[3:], self._memory, **wide),
                self._windows,
                spacing=6,
                margin=(4, 12, 4, 12),
                **wide,
            )
        )
        self.update()
        document.add_periodic_callback(self.update, max(200, int(1000 * watcher.interval)))

    def update(self) -> None:
        """Show what is known now."""
        view = self._watcher.view(self._count)
        self._count = view.count
        if view.rows:
            self._stream(view)
        self._head.text = words.head(self._watcher.source.url, view)
        self._summary.text = words.message(view) + words.tiles(view)
        self._windows.visible = view.sample is not None and "window_tokens" in view.sample.values
        self._show_sizes(view)
        self._show_times()

    def _stream(self, view: View) -> None:
        new = {name: [each[name] for each in view.rows] for name in COLUMNS}
        new["time"] = [wall_clock(each["time"]) for each in view.rows]
        self._rows.stream(new, rollover=self._watcher.rows_kept)

    def _show_sizes(self, view: View) -> None:
        bars = words.sizes(view.sample, view.served) if view.sample is not None else []
        self._memory.visible = bool(bars)
        if bars:
            charts.show_sizes(self._memory, self._sizes, bars)

    def _show_times(self) -> None:
        end = wall_clock(time.time())
        start = end - 60e3 * SPANS[self._span.active]
        self._times.update(start=start, end=end)
        for chart, plot in self._plots.items():
            charts.show_until(plot, charts.highest(chart, self._rows, start))


def wall_clock(seconds: float) -> float:
    """``seconds`` since the epoch as Bokeh's axes, which know no time zones, show this machine's time: ms."""
    offset = datetime.fromtimestamp(seconds).astimezone().utcoffset()
    return 1000 * (seconds + (offset.total_seconds() if offset is not None else 0.0))
