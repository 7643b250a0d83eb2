"""The longest window a family may be asked for is one whose verify fits a GPU, compiled for an H100 without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_mamba_mtp.families.table import FAMILIES

FAMILY = [pytest.param("gdn"), pytest.param("mamba2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", FAMILY)
def test_it_fits_with_most_nodes(family: str) -> None:
    window = FAMILIES[family].longest_window
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.longest_window", family, str(window)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and f"window {window}, 64 nodes" in run.stdout, run.stdout + run.stderr[-2000:]
