"""The wheel: all is in it, SGLang finds the plugin in it, and it leaves Hugging Face's ``kernels`` alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "sglang_mamba_mtp", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, unpacked into a folder that can stand on PYTHONPATH."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (built,) = source.glob("*.whl")
    zipfile.ZipFile(built).extractall(site)
    return site


def run(site: Path, code: str) -> str:
    """Output of ``code`` in a process that sees the unpacked wheel before anything else (no editable install)."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_is_packed(wheel: Path) -> None:
    for folder, name in (("sglang_mamba_mtp", "sglang_mamba_mtp"), ("kernels", "mamba_mtp_kernels")):
        wanted = {p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob("*.py")}
        packed = {p.relative_to(wheel / name) for p in (wheel / name).rglob("*.py")}
        assert packed == wanted, f"{folder}: pyproject.toml lists packages by name and misses some"


def test_sglang_finds_the_plugin(wheel: Path) -> None:
    code = (
        "from importlib.metadata import distributions\n"
        "found = [e for d in distributions(path=['.']) for e in d.entry_points if e.group == 'sglang.srt.plugins']\n"
        "print([(e.name, e.value) for e in found])"
    )
    assert run(wheel, code) == "[('mamba_mtp', 'sglang_mamba_mtp.plugin:register')]"


def test_kernels_import_under_their_own_name(wheel: Path) -> None:
    code = "import mamba_mtp_kernels.gdn.reference as m; print(m.__file__)"
    assert run(wheel, code).startswith(str(wheel))


def test_hugging_face_kernels_is_not_shadowed(wheel: Path) -> None:
    pytest.importorskip("kernels", reason="Hugging Face's kernels package is not installed")
    assert run(wheel, "import kernels; print(hasattr(kernels, 'get_kernel'))") == "True"
    # From the checkout too, where a folder called kernels stands in the working directory.
    code = "import kernels; print(hasattr(kernels, 'get_kernel'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
