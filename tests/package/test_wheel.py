"""What is handed out: the source distribution and the wheel made from it. All is in them, SGLang finds the plugin, it
goes away again without a trace, and Hugging Face's ``kernels`` is left alone."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import mamba_mtp_kernels.version
import pytest

import sglang_mamba_mtp

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "kernels", "launch", "requirements", "sglang_mamba_mtp", "tests")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", ".cache")


@dataclass(frozen=True)
class Built:
    """source: the unpacked sdist; wheel: the wheel built from that; site: the wheel unpacked, for PYTHONPATH."""

    source: Path
    wheel: Path
    site: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """This checkout's sdist, and its wheel. Needs setuptools and no network."""
    checkout, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("built")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, ignore=CACHES)
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    sdist = build("sdist", checkout, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    wheel = build("wheel", source, folder)
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return Built(source, wheel, folder / "site")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Call the build backend as pip does; returns the archive."""
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind])
    return archive


def files(folder: Path, pattern: str = "*") -> set[Path]:
    """Files under ``folder``, without caches."""
    found = (path for path in folder.rglob(pattern) if path.is_file())
    return {path.relative_to(folder) for path in found if "__pycache__" not in path.parts}


def run(site: Path, code: str) -> str:
    """Output of ``code`` in a process that sees the unpacked wheel before anything else (no editable install)."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --------------------------------------------------------------------------------------------------------- what is in


@pytest.mark.parametrize("name", FOLDERS)
def test_the_sdist_has_every_file(built: Built, name: str) -> None:
    assert files(ROOT / name) == files(built.source / name)


def test_every_module_is_in_the_wheel_and_nothing_else(built: Built) -> None:
    for folder, name in (("sglang_mamba_mtp", "sglang_mamba_mtp"), ("kernels", "mamba_mtp_kernels")):
        wanted, packed = files(ROOT / folder, "*.py"), files(built.site / name)
        assert packed == wanted, f"{folder}: pyproject.toml lists packages by name and misses some"
    info = f"sglang_mamba_mtp-{sglang_mamba_mtp.__version__}.dist-info"
    assert {path.name for path in built.site.iterdir()} == {"sglang_mamba_mtp", "mamba_mtp_kernels", info}


def test_the_metadata_says_who_what_and_under_which_licence(built: Built) -> None:
    (path,) = built.site.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(path.read_text())
    assert metadata["Author"] == "sglang_mamba_mtp contributors"
    assert metadata["License-Expression"] == "Apache-2.0" and (path.parent / "licenses" / "LICENSE").is_file()
    assert "speculative decoding" in metadata["Keywords"]
    assert any(line.startswith("Operating System ::") for line in metadata.get_all("Classifier"))
    assert "Requires-Dist" not in {key for key, value in metadata.items() if "extra ==" not in value}


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sglang_mamba_mtp.__version__ == mamba_mtp_kernels.version.__version__
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


# -------------------------------------------------------------------------------------------------------- what it does


def test_kernels_import_under_their_own_name(built: Built) -> None:
    code = "import mamba_mtp_kernels.gdn.reference as m; print(m.__file__)"
    assert run(built.site, code).startswith(str(built.site))


def test_hugging_face_kernels_is_not_shadowed(built: Built) -> None:
    pytest.importorskip("kernels", reason="Hugging Face's kernels package is not installed")
    assert run(built.site, "import kernels; print(hasattr(kernels, 'get_kernel'))") == "True"
    # From the checkout too, where a folder called kernels stands in the working directory.
    code = "import kernels; print(hasattr(kernels, 'get_kernel'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


# --------------------------------------------------------------------------------------------- installed, and removed

SEEN = """
import importlib.metadata, importlib.util
found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="mamba_mtp")
names = ("sglang_mamba_mtp", "mamba_mtp_kernels", "sglang")
print([entry.value for entry in found], [name for name in names if importlib.util.find_spec(name)])
"""

LOADED = """
from sglang_mamba_mtp import cpu
cpu.install()
from sglang.srt.plugins import load_plugins
load_plugins()
import mamba_mtp_kernels.version, sglang_mamba_mtp
from sglang_mamba_mtp.hooks import registry
print(len(registry.registered()) > 0, sglang_mamba_mtp.__file__, mamba_mtp_kernels.version.__file__)
"""


@pytest.fixture
def clean(tmp_path: Path):
    """An interpreter with SGLang and what it needs, as installed here, and without the plugin: ``run(*arguments)``."""
    venv, stock = tmp_path / "venv", tmp_path / "stock"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, capture_output=True)
    installed = Path(next(path for path in sys.path if (Path(path) / "sglang" / "__init__.py").is_file()))
    stock.mkdir()
    for path in installed.iterdir():
        if "mamba_mtp" not in path.name and path.suffix != ".pth" and path.name not in ("pip", "__pycache__"):
            (stock / path.name).symlink_to(path)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "PYTHON"))}
    env.update(PYTHONPATH=str(stock), PYTHONDONTWRITEBYTECODE="1", PIP_NO_INDEX="1", HF_HUB_OFFLINE="1")
    if not os.path.exists("/dev/nvidiactl"):
        env["SGLANG_USE_CPU_ENGINE"] = "1"

    def run(*arguments: str) -> str:
        command = [str(venv / "bin" / "python"), *arguments]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    run.venv = venv
    return run


@pytest.mark.once
def test_installed_it_is_loaded_and_removed_nothing_is_left(built: Built, clean) -> None:
    before = files(clean.venv)
    assert clean("-c", SEEN) == "[] ['sglang']"
    clean("-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", str(built.wheel))
    assert (
        clean("-c", SEEN) == "['sglang_mamba_mtp.plugin:register'] ['sglang_mamba_mtp', 'mamba_mtp_kernels', 'sglang']"
    )
    registered, *places = clean("-W", "ignore", "-c", LOADED).splitlines()[-1].split()
    assert registered == "True" and all(place.startswith(str(clean.venv)) for place in places)
    clean("-m", "pip", "uninstall", "--quiet", "--yes", "--disable-pip-version-check", "sglang-mamba-mtp")
    assert clean("-c", SEEN) == "[] ['sglang']"
    assert files(clean.venv) == before
