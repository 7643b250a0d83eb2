"""Fixtures of the engine tests: SGLang imported once, checkpoints written once."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from . import harness

# Where there is a GPU the tests marked gpu run, each engine in a process of its own.
harness.prepare_environment("cuda" if os.path.exists("/dev/nvidiactl") else "cpu")
# States are small, and threads of several test processes wait for each other longer than one takes alone.
torch.set_num_threads(1)


class Checkpoints:
    """``checkpoints(family)`` is the folder of a tiny random-weight model, written on first use."""

    def __init__(self, root, seed: int = 0):
        self._root, self._seed = root, seed

    def __call__(self, family: str) -> str:
        from . import models

        folder = self._root / family
        if not (folder / "config.json").exists():
            models.WRITERS[family](folder, seed=self._seed)
        return str(folder)

    @property
    def vocab(self) -> int:
        """Token ids below this are ordinary tokens (the last id of the vocabulary ends a text)."""
        from . import models

        return models.VOCAB - 1


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def others(tmp_path_factory) -> Checkpoints:
    """Models like `checkpoint`'s with other weights."""
    return Checkpoints(tmp_path_factory.mktemp("others"), seed=1)


@pytest.fixture(scope="module")
def engines(request, checkpoint):
    """What the chosen tests of a module, each of a `gpu_engines.Cell`, need of engines on a GPU."""
    from .gpu_engines import Engines, chosen

    return Engines(chosen(request.module, request.session.items), checkpoint)


@pytest.fixture(scope="session")
def sglang_version() -> str:
    """SGLang, imported once into the process that forks the engines."""
    return harness.import_sglang()


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Callable[[str], str]:
    """``written(model)`` is the folder of its checkpoint, written on first use."""
    root = tmp_path_factory.mktemp("models")

    def folder(model: str) -> str:
        from .more_models import WRITERS

        if not (root / model / "config.json").exists():
            WRITERS[model](root / model)
        return str(root / model)

    return folder
