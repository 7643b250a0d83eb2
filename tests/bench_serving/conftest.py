"""Values that need no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

GDN = {"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 4, "vocab_size": 704}
MAMBA2 = {"architectures": ["NemotronHForCausalLM"], "num_nextn_predict_layers": 1, "vocab_size": 704}


@pytest.fixture
def gdn(tmp_path: Path) -> Path:
    """A folder that passes for a model with gated delta nets."""
    return _model(tmp_path / "gdn", GDN)


@pytest.fixture
def mamba2(tmp_path: Path) -> Path:
    """A folder that passes for a Mamba2 model."""
    return _model(tmp_path / "mamba2", MAMBA2)


def _model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def parse(tmp_path: Path, gdn: Path):
    """The benchmark's options for a GDN model on a CPU, with a record in a folder of the test."""
    from mtp_bench import options

    def build(*flags: str):
        chosen = [] if "--model-path" in flags or "--shape" in flags else ["--model-path", str(gdn)]
        return options.parse([*chosen, "--device", "cpu", "--quick", "--out", str(tmp_path / "r.json"), *flags])

    return build
