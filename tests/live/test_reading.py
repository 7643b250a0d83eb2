"""Texts of a real server, in either style of names, and what becomes of several ranks."""

from __future__ import annotations

import json

import pytest

from sglang_mamba_mtp.live.reading import AVERAGED, SUMMED, Served, sample_of, served_of
from sglang_mamba_mtp.metrics.export import COUNTERS, GAUGES, PREFIX

from .conftest import INFO, METRICS


@pytest.mark.parametrize("style", METRICS)
def test_all_is_read_in_either_style(style):
    sample = sample_of(METRICS[style])
    assert sample.values.keys() == {*SUMMED, *AVERAGED}
    assert sample.labels == {
        "mode": "replay",
        "family": "GDN",
        "plugin_version": "0.1.0",
        "model_name": "launch/models/tiny-gdn",
    }
    assert sample.has_plugin
    assert (sample.values["running"], sample.values["waiting"], sample.values["request_limit"]) == (3, 5, 6)
    assert sample.values["throughput"] > 100 and 1 <= sample.values["accept_length"] <= 4
    assert sample.values["slot_bytes"] * sample.values["state_slots"] == 215040 * 64
    assert sample.values["verifies"] > 0 and sample.values["folds"] > 0


def test_the_styles_differ_and_say_nearly_the_same():
    assert "sglang:num_running_reqs{" in METRICS["colons"] and "sglang_num_running_reqs{" in METRICS["underscores"]
    colons, underscores = (sample_of(METRICS[style]).values for style in ("colons", "underscores"))
    assert {name: colons[name] for name in AVERAGED if name.endswith("bytes")} == {
        name: underscores[name] for name in AVERAGED if name.endswith("bytes")
    }


def test_our_names_are_exported_ones():
    read = {metric for metrics in (*SUMMED.values(), *AVERAGED.values()) for metric in metrics}
    ours = {metric.removeprefix(PREFIX) for metric in read if metric.startswith(PREFIX)}
    assert ours and ours <= {*GAUGES, *(f"{name}_total" for name in COUNTERS)}


def series(name: str, *values: tuple[float, dict[str, int]]) -> str:
    lines = [f"# TYPE {name} gauge"]
    for value, ranks in values:
        labels = ",".join(f'{label}="{rank}"' for label, rank in ranks.items())
        lines.append(f"{name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


def test_ranks_of_tensor_parallel_are_counted_once_and_those_of_data_parallel_added():
    both = [{"tp_rank": tp, "dp_rank": dp} for dp, tp in ((0, 10), (0, 2), (1, 12), (1, 11))]
    text = series("sglang:num_running_reqs", *zip((9, 3, 9, 4), both, strict=True))
    text += series("sglang:mamba_usage", *zip((9, 0.2, 9, 0.4), both, strict=True))
    values = sample_of(text).values
    assert values["running"] == 7
    assert values["slots_used"] == pytest.approx(0.3)


def test_sglangs_accept_length_serves_where_the_plugin_does_not():
    lines = [line for line in METRICS["colons"].splitlines() if "mamba_mtp" not in line]
    sample = sample_of("\n".join(lines))
    assert not sample.has_plugin and "verifies" not in sample.values
    assert sample.values["accept_length"] == sample_of(METRICS["colons"]).values["accept_length"]
    assert sample.labels == {"model_name": "launch/models/tiny-gdn"}


def test_retractions_are_0_until_there_is_one_and_unknown_without_a_scheduler():
    assert "num_retracted_requests" not in METRICS["colons"]
    assert sample_of(METRICS["colons"]).values["retracted"] == 0
    one = series("sglang:num_retracted_requests_total", (4, {"tp_rank": 0}))
    assert sample_of(METRICS["colons"] + one.replace("gauge", "counter")).values["retracted"] == 4
    assert sample_of("").values == {}


@pytest.mark.parametrize("text", ["<html>hello</html>", '{"detail": "Not Found"}', "hello"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError):
        sample_of(text)


def test_server_info():
    served = served_of(INFO)
    assert served == Served(
        sglang_version="0.5.23",
        model="launch/models/tiny-gdn",
        radix="rewind",
        drafts="EAGLE, 4 nodes",
        parts={"windows": 1220520},
    )


@pytest.mark.parametrize("told", [{}, {"internal_states": []}, {"internal_states": [None]}, {"version": None}])
def test_server_info_without_the_plugin(told):
    assert served_of(json.dumps(told)) == Served()


def test_server_info_that_is_none():
    with pytest.raises(ValueError):
        served_of("[]")
