"""README's pictures are what their program makes of the records."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures():
    """launch/docs/pictures.py, a program."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "launch" / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagram_is_the_drawn_one(pictures):
    drawn = pictures.step()
    xml.etree.ElementTree.fromstring(drawn)
    assert (pictures.IMAGES / "step.svg").read_text(encoding="utf-8") == drawn, "run: python launch/docs/pictures.py"


def test_every_server_of_the_records_has_a_bar(pictures):
    for name in pictures.MODELS.values():
        held = pictures.requests_in_memory(json.loads((pictures.RESULTS / name).read_text(encoding="utf-8")))
        assert len(held) >= 4 and set(held) <= set(pictures.BARS)


def test_readmes_table_has_the_records_numbers(pictures):
    """The table under the first plot: no speculation, SGLang's verify, its flag, slots, replay."""
    modes = ("none", "stock", "replayssm", "slots", "rewind")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    record = json.loads((pictures.RESULTS / next(iter(pictures.MODELS.values()))).read_text(encoding="utf-8"))
    held = pictures.requests_in_memory(record)
    full = {load["mode"]: load for load in record["loads"] if load["concurrency"] == 256}
    rows = {
        "requests in the same memory": held,
        "decode tokens/s, 256 requests": {
            mode: load["server_log"]["decode_tokens_per_second"] for mode, load in full.items()
        },
        "output tokens/s of that whole run": {
            mode: load["bench_serving"]["output_throughput"] for mode, load in full.items()
        },
    }
    for name, measured in rows.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |")).removeprefix(f"| {name} |")
        assert [int(number) for number in re.findall(r"\d+", row)] == [round(measured[mode]) for mode in modes]


def test_the_plot_can_be_drawn(pictures, tmp_path):
    pictures.draw_requests(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
