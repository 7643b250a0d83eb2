"""Kernel tests run on the GPU where there is one and in Triton's interpreter elsewhere: the same bodies."""

from __future__ import annotations

import os

import pytest
import torch

from . import interpreter

if not torch.cuda.is_available():
    # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreter.quicken()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
