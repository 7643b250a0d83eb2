"""The monitoring page names every metric, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_mamba_mtp.metrics.export import COUNTERS, GAUGES

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def test_the_page_lists_what_is_exported():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*GAUGES, *(f"{name}_total" for name in COUNTERS), "info"}
