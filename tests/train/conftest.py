"""Makes launch/train importable and torch small."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "launch" / "train"
sys.path.insert(0, str(TRAIN))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def models_folder() -> Path:
    return ROOT / "launch" / "models"


@pytest.fixture(scope="session")
def tokenizer_folder() -> Path:
    return TRAIN / "tokenizer"
