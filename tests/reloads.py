"""Weights that a running server is told to take from a folder, and a folder of others that fit."""

from __future__ import annotations

import shutil
from pathlib import Path


def with_other_decays(model: Path, folder: Path) -> Path:
    """Write a copy of a model in one file whose recurrent layers forget faster: ``dt_bias`` is larger by 2."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    changed = {name: tensor + 2 for name, tensor in weights.items() if name.endswith("dt_bias")}
    assert changed, f"{model} has no recurrent layers"
    save_file(weights | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(url: str, folder: Path | str) -> None:
    """Have a server load ``folder``'s weights, and flush its cache as it does then. Raises where it did not."""
    import requests

    answer = requests.post(f"{url}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=600)
    answer.raise_for_status()
    assert answer.json()["success"], answer.text
