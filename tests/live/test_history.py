"""Rates, across restarts and outages; what a page that comes later gets."""

from __future__ import annotations

from math import isnan

import pytest

from sglang_mamba_mtp.live.history import COLUMNS, RATE_SECONDS, History, increase
from sglang_mamba_mtp.live.reading import Sample

START = {"verifies": 100.0, "committed_tokens": 300.0, "folds": 10.0, "folded_tokens": 80.0, "retracted": 2.0}


def later(values: dict[str, float], **more: float) -> dict[str, float]:
    return {name: value + more.get(name, 0.0) for name, value in values.items()}


def last(history: History) -> dict[str, float]:
    (row,) = history.after(history.count - 1)
    return dict(row)


def test_counters_that_begin_again_have_counted_since_0():
    assert increase(5, 9) == 4
    assert increase(9, 4) == 4
    assert increase(9, 9) == 0


def test_rates_are_means_of_the_last_seconds():
    history = History(10)
    history.add(1000, Sample(START))
    row = last(history)
    assert all(isnan(row[name]) for name in ("verified", "folds", "accept_length", "tokens_a_fold"))
    history.add(1002, Sample(later(START, verifies=10, committed_tokens=36, folds=4, folded_tokens=30)))
    row = last(history)
    assert row["verified"] == 18 and row["accept_length"] == pytest.approx(3.6)
    assert row["folds"] == 2 and row["tokens_a_fold"] == 7.5
    assert set(row) == {"time", *COLUMNS}
    history.add(1004 + RATE_SECONDS, Sample(later(START, verifies=10, committed_tokens=36)))
    row = last(history)
    assert row["verified"] == 0 and isnan(row["accept_length"]), "without verifies there is no accept length"


def test_a_server_that_was_started_again_makes_no_negative_rate():
    history = History(10)
    history.add(0, Sample(START))
    history.add(2, Sample(later(START, verifies=10, committed_tokens=30, retracted=1)))
    history.add(4, Sample({"verifies": 5.0, "committed_tokens": 20.0, "retracted": 1.0}))
    row = last(history)
    assert row["verified"] == (30 + 20) / 4
    assert row["accept_length"] == 50 / 15
    assert row["retracted"] == 1 + 1


def test_an_outage_is_a_gap_and_no_rate_reaches_over_it():
    history = History(10)
    history.add(0, Sample(START))
    history.gap(2)
    assert all(isnan(value) for name, value in last(history).items() if name != "time")
    history.add(4, Sample(later(START, committed_tokens=1000, verifies=500, retracted=5)))
    row = last(history)
    assert isnan(row["verified"]) and isnan(row["accept_length"])
    assert row["retracted"] == 5, "what was retracted meanwhile counts"
    history.add(6, Sample(later(START, committed_tokens=1020, verifies=510, retracted=5)))
    assert last(history)["verified"] == 10


def test_shares_are_percent():
    values = {
        "slots_used": 0.25,
        "kv_used": 0.5,
        "window_occupancy": 0.75,
        "pending_tokens_max": 9,
        "window_tokens": 12,
    }
    history = History(10)
    history.add(0, Sample(values))
    row = last(history)
    assert [row[name] for name in ("slots_used", "kv_used", "occupancy", "fullest")] == [25, 50, 75, 75]


def test_without_the_plugin_the_accept_length_is_sglangs_and_0_is_none():
    history = History(10)
    history.add(0, Sample({"accept_length": 2.5}))
    assert last(history)["accept_length"] == 2.5
    history.add(2, Sample({"accept_length": 0.0}))
    assert isnan(last(history)["accept_length"])


def test_a_page_gets_what_it_has_not_yet():
    history = History(3)
    assert history.after(0) == []
    for time in range(5):
        history.gap(time)
    assert [row["time"] for row in history.after(0)] == [2, 3, 4], "the oldest are forgotten"
    assert [row["time"] for row in history.after(3)] == [3, 4]
    assert history.after(5) == []
