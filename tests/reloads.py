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
    """Have a server load ``folder``'s weights, then flush its cache. Raises where it did not.

    Two requests of one: a reply may be here while its last step is still on its way, and a flush that comes with the
    weights does not wait for it: SGLang 0.5.23 refuses, 0.5.17's scheduler ends.
    """
    import requests

    body = {"model_path": str(folder), "flush_cache": False}
    answer = requests.post(f"{url}/update_weights_from_disk", json=body, timeout=600)
    assert answer.ok and answer.json()["success"], answer.text
    flushed = requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60)
    assert flushed.ok, flushed.text
