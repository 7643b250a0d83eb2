"""Plugin and kernels come from one installation, or nothing starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_mamba_mtp
from sglang_mamba_mtp import plugin
from sglang_mamba_mtp.compat import version
from sglang_mamba_mtp.errors import MtpError


def kernels_before_ours(folder: Path, source: str | None) -> dict[str, str]:
    """An environment in which another `mamba_mtp_kernels` is found first. source: of its version.py, if it has one."""
    package = folder / "mamba_mtp_kernels"
    (package / "common").mkdir(parents=True)
    (package / "common" / "__init__.py").write_text("")
    if source is not None:
        (package / "version.py").write_text(source)
    ours = Path(sglang_mamba_mtp.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ours), os.environ.get("PYTHONPATH", "")])}


def test_those_of_this_checkout_match():
    version.require_matching_kernels()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('__version__ = "0.0.9"', "its kernels are 0.0.9 ("),
        (None, "its kernels are older than any with a version ("),
    ],
)
def test_other_kernels_are_refused_with_both_places(tmp_path, source, words):
    program = (
        "from sglang_mamba_mtp.compat import version\n"
        "from sglang_mamba_mtp.errors import MtpError\n"
        "try: version.require_matching_kernels()\n"
        "except MtpError as error: print(error)"
    )
    env = kernels_before_ours(tmp_path, source)
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert words in told.stdout, told.stderr
    assert str(tmp_path) in told.stdout and str(Path(sglang_mamba_mtp.__file__).parent) in told.stdout
    assert "PYTHONPATH" in told.stdout


def test_registration_stops_sglang(monkeypatch):
    def refuse():
        raise MtpError("two installations")

    monkeypatch.setattr(version, "require_matching_kernels", refuse)
    with pytest.raises(SystemExit, match="two installations"):
        plugin.register()
