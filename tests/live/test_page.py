"""The document a browser gets, built without one."""

from __future__ import annotations

import pytest

pytest.importorskip("bokeh", reason="the live page's extra is not installed")

from bokeh.document import Document
from bokeh.models import ColumnDataSource, Div
from bokeh.plotting import figure

from sglang_mamba_mtp.live import charts
from sglang_mamba_mtp.live.asking import Trouble
from sglang_mamba_mtp.live.history import COLUMNS
from sglang_mamba_mtp.live.page import Page, wall_clock
from sglang_mamba_mtp.live.reading import Sample, sample_of, served_of
from sglang_mamba_mtp.live.watching import Watcher

from .conftest import INFO, METRICS


class Server:
    """Says what it is given; a `Trouble` in its place is raised."""

    url = "http://gpu:30000"

    def __init__(self) -> None:
        self.says: Sample | Trouble = sample_of(METRICS["colons"])
        self.started = served_of(INFO)

    def sample(self) -> Sample:
        if isinstance(self.says, Trouble):
            raise self.says
        return self.says

    def served(self):
        return self.started


class Shown:
    """A page of a `Server`, one reading a second."""

    def __init__(self) -> None:
        self.server, self.now = Server(), 1000.0
        self.watcher = Watcher(self.server, 1.0, clock=lambda: self.now)
        self.document = Document()
        self.page = Page(self.document, self.watcher)

    def look(self, **values: float) -> None:
        """One reading, with other values if they are given."""
        if values:
            self.server.says = Sample({**self.server.says.values, **values}, self.server.says.labels)
        self.now += 1
        self.watcher.look()
        self.page.update()

    @property
    def words(self) -> str:
        return " ".join(div.text for div in self.document.select({"type": Div}))

    @property
    def data(self) -> dict[str, list[float]]:
        sources = self.document.select({"type": ColumnDataSource})
        return next(source.data for source in sources if "time" in source.data)

    def plot(self, title: str) -> figure:
        (found,) = [each for each in self.document.select({"type": figure}) if each.title.text.startswith(title)]
        return found


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_before_anything_is_known(shown):
    assert "Not asked yet." in shown.words
    assert not shown.plot("Memory").visible
    shown.document.validate()


def test_what_is_served_is_said(shown):
    shown.look()
    for word in ("http://gpu:30000", "tiny-gdn", "replay", "GDN", "rewind", "EAGLE, 4 nodes", "0.5.23", "0.1.0"):
        assert f"<i>{word}</i>" in shown.words
    assert 'class="trouble"' not in shown.words and 'class="note"' not in shown.words
    assert 'data-value="requests waiting">5<' in shown.words
    assert "of at most 6" in shown.words and "state slots allow 32 running" in shown.words
    assert "1.2 MiB" in shown.words and "4.6 MiB less than SGLang" in shown.words


def test_numbers_arrive(shown):
    shown.look()
    values = shown.server.says.values
    shown.look(
        verifies=values["verifies"] + 10, committed_tokens=values["committed_tokens"] + 33, running=40, retracted=3
    )
    assert shown.data["verified"][-1] == 33 and shown.data["accept_length"][-1] == 3.3
    assert shown.data["running"] == [3, 40] and shown.data["retracted"] == [0, 3]
    assert shown.data["time"] == [wall_clock(1001), wall_clock(1002)]
    assert 'data-value="accept length">3.30<' in shown.words
    assert 'data-value="retracted">3<' in shown.words


def test_every_column_is_drawn_once_and_axes_hold_what_is_seen(shown, monkeypatch):
    drawn = [line.column for chart in (*charts.ALWAYS, *charts.WINDOWS) for line in chart.lines]
    assert sorted(drawn) == sorted(COLUMNS)
    monkeypatch.setattr("sglang_mamba_mtp.live.page.time.time", lambda: shown.now)
    shown.look(running=40)
    assert 40 < shown.plot("Requests").y_range.end < 50
    shown.now += 3600
    shown.look(running=1)
    assert shown.plot("Requests").y_range.end < 40, "what is no longer seen does not stretch the axis"
    assert shown.plot("Pools").y_range.end == 100


def test_memory_by_kind(shown):
    shown.look()
    assert shown.plot("Memory").y_range.factors == ["SGLang's verify", "windows", "64 state slots"]
    (bars,) = [each.data for each in shown.document.select({"type": ColumnDataSource}) if "kind" in each.data]
    assert bars["bytes"] == [64 * 215040, 1220520, 6021120]
    assert bars["text"] == ["13.1 MiB", "1.2 MiB", "5.7 MiB, not held"]


def test_a_page_opened_later_has_the_history(shown):
    for _ in range(5):
        shown.look()
    document = Document()
    Page(document, shown.watcher)
    (rows,) = [each.data for each in document.select({"type": ColumnDataSource}) if "time" in each.data]
    assert len(rows["time"]) == 5


def test_trouble_is_said_and_old_numbers_are_gone_until_it_is_over(shown):
    shown.look()
    before, shown.server.says = shown.server.says, Trouble("No server answers at <b>there</b>.")
    shown.look()
    assert "No server answers at &lt;b&gt;there&lt;/b&gt;." in shown.words
    assert 'data-value="requests running">\N{EN DASH}<' in shown.words and "not answering" in shown.words
    assert shown.data["running"][-1] != shown.data["running"][-1], "a gap"
    shown.server.says = before
    shown.look()
    assert 'class="trouble"' not in shown.words and 'data-value="requests running">3<' in shown.words


def test_without_the_plugin_sglangs_numbers_are_shown(shown):
    lines = [line for line in METRICS["colons"].splitlines() if "mamba_mtp" not in line]
    shown.server.says, shown.server.started = sample_of("\n".join(lines)), served_of("{}")
    shown.look()
    assert 'class="note"' in shown.words and "--mamba-mtp-mode off" in shown.words
    assert 'data-value="requests running">3<' in shown.words
    assert not shown.plot("Memory").visible


def test_charts_of_windows_are_for_servers_that_have_some(shown):
    windows = shown.page._windows
    shown.look()
    assert windows.visible
    values = {name: value for name, value in shown.server.says.values.items() if not name.startswith("window")}
    shown.server.says = Sample(values, {**shown.server.says.labels, "mode": "slots"})
    shown.look()
    assert not windows.visible


def test_what_a_server_says_of_itself_is_no_html(shown):
    shown.server.says = Sample(shown.server.says.values, {**shown.server.says.labels, "family": "<script>"})
    shown.look()
    assert "<script>" not in shown.words and "&lt;script&gt;" in shown.words


def test_the_span_can_be_chosen(shown):
    shown.look()
    spans = [shown.page._times.end - shown.page._times.start]
    shown.page._span.active = 3
    spans.append(shown.page._times.end - shown.page._times.start)
    assert spans == pytest.approx([5 * 60e3, 60 * 60e3])


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (-(2**21), "-2.0 MiB"), (5000 * 2**30, "5,000.0 GiB")]
)
def test_sizes(size, text):
    assert charts.size_text(size) == text
