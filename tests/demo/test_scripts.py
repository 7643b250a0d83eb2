"""The shell scripts: syntax, help, errors told before anything is set up; and the plugin without installation."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from mtp_demo import needs, plugin_site
from mtp_demo.server import free_port

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
        (("launch/eval_gsm8k.sh", "--questions", "0"), "--questions 0: must be from 1 to 200"),
        (("launch/eval_gsm8k.sh", "--questions", "201"), "must be from 1 to 200"),
        (("launch/eval_gsm8k.sh", "--parallel", "0"), "--parallel 0: must be"),
        (("launch/eval_gsm8k.sh", "--port", "70000"), "--port 70000: must be"),
        (("launch/eval_gsm8k.sh", "--port", "30000", "--", "--plain"), "asks a server that runs"),
        (("launch/serve_tiny.sh", "--python", "/no/python"), "no interpreter at /no/python"),
        (("launch/serve_tiny.sh", "--version", "0.4"), "has no lock file; supported:"),
        (("launch/serve_tiny.sh", "--model", "/no/model"), "has no config.json"),
    ],
)
def test_wrong_flags_are_told_before_set_up(arguments, message):
    told = bash(*arguments)
    assert told.returncode == 2
    assert message in told.stderr


def test_a_port_nobody_listens_on_is_told_before_set_up():
    port = free_port()
    told = bash("launch/eval_gsm8k.sh", "--port", str(port), "--version", "0.0.0")
    assert told.returncode == 3
    assert f"nobody listens on port {port}" in told.stderr


@pytest.mark.parametrize(("given", "host"), [((), "127.0.0.1"), (("--host", "10.1.2.3"), "10.1.2.3")])
def test_a_tiny_models_server_listens_on_this_machine_unless_told(given, host, tmp_path):
    """An interpreter that shows the command stands in for the one with SGLang."""
    shows = tmp_path / "python"
    shows.write_text('#!/bin/sh\n[ "$2" != sglang.launch_server ] || printf "%s\\n" "$@"\n')
    shows.chmod(0o755)
    told = bash("launch/serve_tiny.sh", "--python", str(shows), *given)
    assert told.returncode == 0, told.stderr
    flags = told.stdout.split()
    hosts = [value for flag, value in itertools.pairwise(flags) if flag == "--host"]
    assert hosts[-1] == host


@pytest.mark.parametrize(
    ("version", "missing", "words"),
    [
        ((3, 11), (), None),
        ((3, 10), (), "is Python 3.10; 3.11, 3.12 or 3.13 is needed"),
        ((3, 11), ("sglang", "torch"), "has no SGLang"),
        ((3, 12), ("psutil", "tokenizers"), "lacks psutil, tokenizers; install with: "),
    ],
)
def test_what_an_interpreter_lacks_is_told(version, missing, words):
    told = needs.complaint(version, lambda name: None if name in missing else "there")
    assert told is None if words is None else words in told


def test_an_interpreter_without_sglang_is_refused(tmp_path):
    """A Python of the right version with nothing installed."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    told = bash("launch/serve_tiny.sh", "--python", str(bare), PYTHONPATH="")
    assert told.returncode == 2
    assert "has no SGLang" in told.stderr


def test_the_demo_needs_nothing_that_sglang_does_not_bring():
    """With --python, what our own environments add may be missing."""
    hidden = ("rich", "tqdm", "matplotlib", "hypothesis", "pytest")
    program = (
        f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'launch' / 'demo')!r})\n"
        "import gsm8k, main, mtp_demo.report, mtp_demo.run"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr


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
