"""Every version that is supported is pinned by its hashes alone, and can be run somewhere."""

from __future__ import annotations

import re

from .conftest import LOCK, ROOT, VERSIONS


def test_a_line_is_a_version_and_its_hashes():
    for line in LOCK.read_text().splitlines():
        assert re.fullmatch(r"sglang==[0-9.]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_every_version_has_an_environment():
    """Its own, or that of another version (`SGLANG_RUNS_IN` in launch/setup.sh)."""
    own = {each for each in VERSIONS if (ROOT / "requirements" / f"sglang-{each}.txt").exists()}
    (table,) = re.findall(r"^declare -A SGLANG_RUNS_IN=\((.*)\)$", (ROOT / "launch/setup.sh").read_text(), re.MULTILINE)
    borrowed = dict(re.findall(r"\[([0-9.]+)\]=([0-9.]+)", table))
    assert own | set(borrowed) == set(VERSIONS) and own.isdisjoint(borrowed)
    assert set(borrowed.values()) <= own
