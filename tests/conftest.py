"""Shared by all tests: markers, seeds, and a header that says what is under test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
from pathlib import Path

import pytest

MARKERS = {
    "gpu": "needs a CUDA device (deselected without one)",
    "slow": "outside the fast subset (run with --slow or -m slow)",
    "once": "takes long and asks nothing of SGLang's version: runs on the newest one (on others with --slow)",
}

NEWEST = max(Path(__file__).parents[1].glob("requirements/sglang-*.*.*.txt"), key=lambda lock: lock.stem).stem
"""sglang-VERSION, the newest that has an environment of its own."""


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def _has_gpu() -> bool:
    # Asked of the device files, not of torch: a process that has touched CUDA cannot fork engines.
    return os.path.exists("/dev/nvidiactl")


def _is_newest() -> bool:
    return importlib.util.find_spec("sglang") is None or f"sglang-{importlib.metadata.version('sglang')}" == NEWEST


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("-m") or ""
    elsewhere = not _is_newest() and not config.getoption("--slow")
    for item in items:
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if elsewhere and "once" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"runs on {NEWEST}, elsewhere with --slow"))
        if "slow" in item.keywords and not config.getoption("--slow") and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow or -m slow"))


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
