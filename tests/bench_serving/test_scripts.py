"""The shell script: syntax, help, errors told before anything is set up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import ROOT


def bash(*arguments):
    return subprocess.run(["bash", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_script_is_bash():
    assert bash("-n", "launch/bench_serving.sh").returncode == 0


def test_help_needs_no_set_up():
    told = bash("launch/bench_serving.sh", "--help")
    assert told.returncode == 0
    for word in ("--version", "--shape", "nemotron-nano-9b-v2", "--conversations", "--time-limit"):
        assert word in told.stdout, word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --shape or --model-path"),
        (("--shape", "gpt"), "'gpt' is none of"),
        (("--shape", "qwen3-next-80b", "--python", "/no/python"), "no interpreter at /no/python"),
        (("--version",), "--version needs a value"),
    ],
)
def test_wrong_flags_are_told_before_set_up(arguments, message):
    told = bash("launch/bench_serving.sh", *arguments)
    assert told.returncode in (1, 2)
    assert message in told.stderr


def test_flags_are_read_without_any_package():
    """-S: no site-packages."""
    program = [sys.executable, "-S", str(ROOT / "launch" / "bench" / "mtp_bench" / "options.py")]
    told = subprocess.run([*program, "--help"], env={"PATH": os.defpath}, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("model", ["nemotron", "granite", "qwen3.5", "qwen3-next"])
@pytest.mark.parametrize("draft", ["chain4", "chain8", "tree8"])
def test_the_records_flags_are_flags(model, draft):
    """--help comes last: every flag before it was read."""
    told = bash(
        "launch/bench/records.sh", f"{model}-{draft}", "--time-limit", "560", "--python", sys.executable, "--help"
    )
    assert told.returncode == 0, told.stderr
    told = bash("launch/bench/records.sh", f"{model}-{draft}", "--time-limit", "0", "--python", sys.executable)
    assert told.returncode == 2
    assert "--time-limit" in told.stderr


def test_records_are_named():
    told = bash("launch/bench/records.sh", "gpt-chain4")
    assert told.returncode == 2
    assert "nemotron-{chain4,chain8,tree8}" in told.stderr
