"""Shared by all tests: markers, seeds, and a header that says what is under test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
from pathlib import Path

import pytest

# Triton's interpreter multiplies with NumPy, and of the kernels that its OpenBLAS picks by CPU, Haswell's and Zen's sum
# a product of 16 rows and one of 32 in different orders. With this one a fold's bits are those of a GPU on any CPU.
os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")

from .turns import others_turn

MODELS = frozenset(
    {"dflash", "falcon_h1", "granitemoehybrid", "llama", "llama_eagle3", "nemotron_h", "nemotron_h_mtp", "qwen3_5"}
    | {"qwen3_5_mtp", "qwen3_5_text", "qwen3_next", "qwen3_next_mtp"}
)
"""SGLang's files of the models that tests serve."""


def _other_models() -> str:
    """The rest of SGLang's models, which each of a server's processes would import: two fifths of its start on
    0.5.17."""
    found = importlib.util.find_spec("sglang")  # imports nothing of it
    folders = [Path(root, "srt", "models") for root in (found and found.submodule_search_locations) or ()]
    return ",".join(sorted({file.stem for folder in folders for file in folder.glob("*.py")} - MODELS))


os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", _other_models())

MARKERS = {
    "gpu": "needs a CUDA device (deselected without one)",
    "slow": "outside the fast subset (deselected without --slow or -m slow)",
    "once": "takes long and asks nothing of SGLang's version: deselected but on the newest one, on GPUs "
    "and with --slow",
    "in_turn": "takes long: a cell, or what has one value of the parameter that is named, runs on one version in turn, "
    "what has no parameter on all; on GPUs and with --slow all on all",
}

VERSIONS = sorted(lock.stem for lock in Path(__file__).parents[1].glob("requirements/sglang-*.*.*.txt"))
"""sglang-VERSION, those that have an environment of their own, the newest last."""

LEFT_OUT = pytest.StashKey[int]()
"""How many tests their markers have left out."""


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def _has_gpu() -> bool:
    # Asked of the device files, not of torch: a process that has touched CUDA cannot fork engines.
    return os.path.exists("/dev/nvidiactl")


def _version() -> str:
    """The entry of `VERSIONS` that is under test, the newest where there is no SGLang."""
    return (
        VERSIONS[-1] if importlib.util.find_spec("sglang") is None else f"sglang-{importlib.metadata.version('sglang')}"
    )


def pytest_collection_modifyitems(config, items):
    """Deselect what cannot run here or was not asked for: a skip is then a test that found a reason by itself."""
    slow = config.getoption("--slow")
    left_out = set() if slow or "slow" in (config.getoption("-m") or "") else {"slow"}
    if not _has_gpu():
        left_out.add("gpu")
    version = _version()
    if not (version == VERSIONS[-1] or _has_gpu() or slow):
        left_out.add("once")
    leaving = {item.nodeid for item in items if left_out & item.keywords.keys()}
    if version in VERSIONS and not (_has_gpu() or slow):
        leaving |= others_turn(items, version, VERSIONS)
    if leaving:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in leaving])
        items[:] = [item for item in items if item.nodeid not in leaving]
        config.stash[LEFT_OUT] = len(leaving)


def pytest_sessionfinish(session, exitstatus):
    """All that was asked for being left out by its markers is no failure; finding nothing at all is."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(LEFT_OUT, 0):
        session.exitstatus = pytest.ExitCode.OK


def pytest_report_header(config):
    versions = []
    for name in ("sglang", "torch", "triton", "transformers"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} missing")
    return f"under test: {', '.join(versions)}; {os.cpu_count()} cores; GPU: {'yes' if _has_gpu() else 'no'}"


@pytest.fixture(autouse=True)
def _seeds():
    """The same random numbers in every test, whichever ran before it."""
    random.seed(0)
    import numpy
    import torch

    numpy.random.seed(0)
    torch.manual_seed(0)
