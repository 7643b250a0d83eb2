"""The shell scripts: syntax, help, errors told before anything is set up; and the plugin without installation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mtp_demo import plugin_site

from .conftest import ROOT


def bash(*arguments, **environment):
    return subprocess.run(
        ["bash", *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", ["demo.sh", "eval_gsm8k.sh", "serve_tiny.sh", "demo/use_python.sh"])
def test_the_scripts_are_bash(script):
    assert bash("-n", f"launch/{script}").returncode == 0


@pytest.mark.parametrize("script", ["demo.sh", "eval_gsm8k.sh", "serve_tiny.sh"])
def test_help_needs_no_set_up(script):
    told = bash(f"launch/{script}", "--help")
    assert told.returncode == 0
    assert "--version" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch/demo.sh", "--questions", "none"), "--questions"),
        (("launch/demo.sh", "--python", "/no/python"), "no interpreter at /no/python"),
        (("launch/demo.sh", "--version"), "--version needs a value"),
        (("launch/eval_gsm8k.sh", "--question", "5"), "unknown flag --question"),
        (("launch/eval_gsm8k.sh", "--questions", "five"), "'five' is not a number"),
        (("launch/serve_tiny.sh", "--model", "/no/model"), "has no config.json"),
    ],
)
def test_wrong_flags_are_told_before_set_up(arguments, message):
    told = bash(*arguments)
    assert told.returncode in (1, 2)
    assert message in told.stderr


def test_the_plugin_is_found_without_installation(tmp_path):
    plugin_site.make(tmp_path)
    plugin_site.make(tmp_path)
    program = (
        "import importlib.metadata as m, mamba_mtp_kernels.common, sglang_mamba_mtp\n"
        "(entry,) = m.entry_points(group='sglang.srt.plugins', name='mamba_mtp')\n"
        "print(entry.value, m.version('sglang-mamba-mtp'), sglang_mamba_mtp.__file__)"
    )
    # -S: no site-packages, where an editable installation would answer.
    told = subprocess.run(
        [sys.executable, "-S", "-c", program.replace("mamba_mtp_kernels.common, ", "")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.stdout.startswith("sglang_mamba_mtp.plugin:register 0."), told.stderr
    assert str(tmp_path) in told.stdout
    assert (tmp_path / "mamba_mtp_kernels" / "common" / "__init__.py").is_file()
