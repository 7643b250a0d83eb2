"""The longest window a family may be asked for is one whose verify fits a GPU, compiled for an H100 without one."""

from __future__ import annotations

import pytest

from sglang_mamba_mtp.families.table import FAMILIES

from .helpers import run_compiling

FAMILY = [pytest.param("gdn"), pytest.param("mamba2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", FAMILY)
def test_it_fits_with_most_nodes(family: str) -> None:
    window = FAMILIES[family].longest_window
    run = run_compiling(f"{__package__}.longest_window", family, str(window))
    assert run.returncode == 0 and f"window {window}, 64 nodes" in run.stdout, run.stdout + run.stderr[-2000:]
