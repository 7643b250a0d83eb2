"""The report prints whatever can be found out and always exits 0."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from sglang_mamba_mtp import env_report
from sglang_mamba_mtp.compat import version
from sglang_mamba_mtp.hooks.table import TABLE

from ..processes import run_forked


def run_in_fork(changes):
    def body():
        for path, value in changes.items():
            owner, _, name = path.rpartition(".")
            setattr(importlib.import_module(owner), name, value)
        sys.exit(env_report.main())

    return run_forked(body)


def test_everything_in_order(sglang):
    result = run_in_fork({})
    assert result.code == 0
    lines = result.output.splitlines()
    assert any("sglang " in line and sglang in line for line in lines)
    assert f"supported ({version.SUPPORTED})" in result.output
    live = [line for line in lines if line.strip().startswith("hook ") and " live;" in line]
    assert len(live) == len([hook for hook in TABLE if hook.target.is_needed()]), result.output
    assert "MISSING" not in result.output and "NOT LIVE" not in result.output


def test_the_kernels_of_sglang_are_found_under_either_name(monkeypatch):
    """`sglang-kernel` in every supported version, `sgl-kernel` in others."""
    import importlib.metadata

    for there in ({"sglang-kernel": "0.4.5"}, {"sgl-kernel": "0.3"}, {"sglang-kernel": "0.4.10", "sgl-kernel": "0.3"}):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, there=there: _version(name, there))
        name, version = next(iter(there.items()))
        rows = dict(env_report.versions())
        assert rows[name] == version and len({"sglang-kernel", "sgl-kernel"} & set(rows)) == 1
    monkeypatch.setattr(importlib.metadata, "version", lambda name: _version(name, {}))
    assert dict(env_report.versions())["sglang-kernel"] == "not installed"


def _version(name, there):
    if name not in there:
        raise importlib.metadata.PackageNotFoundError(name)
    return there[name]


def test_the_installed_kernels_of_sglang_are_named(sglang):
    assert dict(env_report.versions())["sglang-kernel"][0].isdigit()


def test_unsupported_version(sglang):
    result = run_in_fork({"sglang_mamba_mtp.compat.version.sglang_version": lambda: "0.4.0"})
    assert result.code == 0
    assert "no" in next(line for line in result.output.splitlines() if "supported (" in line).split()
    assert "failed: SystemExit: mamba-mtp: SGLang 0.4.0" in result.output


def test_a_bad_option(sglang, monkeypatch):
    monkeypatch.setenv("SGLANG_MAMBA_MTP_MODE", "fast")
    result = run_in_fork({})
    assert result.code == 0 and "=fast: expected one of" in result.output and "SGLANG_MAMBA_MTP_MODE" in result.output


def test_excluded_by_the_operator(sglang, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    result = run_in_fork({})
    assert result.code == 0 and "excluded by SGLANG_PLUGINS" in result.output and " live;" not in result.output


@pytest.mark.parametrize("missing", ["sglang", "torch"])
def test_without_sglang_or_torch(missing, tmp_path):
    """In a Python that cannot import them, and whose metadata does not know them."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import importlib.metadata, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
version = importlib.metadata.version
def without(name):
    if name == {missing!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without
"""
    )
    run = subprocess.run(
        [sys.executable, "-m", "sglang_mamba_mtp.env_report"],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(tmp_path)},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert f"{missing} " in run.stdout and "not installed" in run.stdout and "[plugin]" in run.stdout
