"""LoRA adapters for the tiny models: as SGLang loads them, and merged into a checkpoint of their own.

A request served with an adapter must get what the merged model says, whoever else is in its batch.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
"""What an adapter adds to a weight is scaled by ALPHA / RANK."""

ATTENTION = {f"self_attn.{part}_proj": (f"self_attn.{part}_proj",) for part in "qkvo"}

MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    # No MLP: SGLang's CPU engine pads it to a multiple of 32, and an adapter's factors no longer fit.
    "qwen3_5": {
        "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "linear_attn.out_proj": ("linear_attn.out_proj",),
        **ATTENTION,
    },
    "nemotron_h": {f"mixer.{name}_proj": (f"mixer.{name}_proj",) for name in ("out", *"qkvo", "down")},
}
"""By model type: the module as SGLang's adapters name it, and the weights of the checkpoint that it is made of, one
below the other."""


def write(model: str | Path, folder: Path, seed: int) -> tuple[str, str]:
    """Write a random adapter for the checkpoint in the folder ``model``, and the two merged.

    Returns:
        the folders of the adapter and of the merged checkpoint, in ``folder``.
    """
    model, generator = Path(model), torch.Generator().manual_seed(seed)
    modules = MODULES[json.loads((model / "config.json").read_text())["model_type"]]
    weights, factors = load_file(model / "model.safetensors"), {}
    for layer in sorted({found[0] for name in weights if (found := re.match(r"(?!mtp).*layers\.\d+(?=\.)", name))}):
        for module, parts in modules.items():
            names = [f"{layer}.{part}.weight" for part in parts]
            if not weights.keys() >= set(names):
                continue
            rows, columns = [weights[name].shape[0] for name in names], weights[names[0]].shape[1]
            a = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            b = torch.randn(sum(rows), RANK, generator=generator) * RANK**-0.5 / 4
            factors |= {f"base_model.model.{layer}.{module}.lora_{one}.weight": x for one, x in (("A", a), ("B", b))}
            for name, added in zip(names, (b @ a * (ALPHA / RANK)).split(rows), strict=True):
                weights[name] = weights[name] + added
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir(parents=True)
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return str(adapter), str(merged)


def server_args(folders: dict[str, str]) -> dict[str, Any]:
    """The ServerArgs keywords that load the adapters in these folders, by name."""
    from sglang.srt.lora.lora_registry import LoRARef

    refs = [LoRARef(LoRARef.deterministic_id(name, path), name, path, pinned=False) for name, path in folders.items()]
    return {"enable_lora": True, "lora_paths": refs, "max_loras_per_batch": len(refs) + 1}


def by_name(scheduler: Any) -> dict[str | None, str | None]:
    """The ids by which a scheduler's requests ask for its adapters; None is the model without any."""
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    return {None: None} | {ref.lora_name: ref.lora_id for ref in (manager.lora_refs.values() if manager else ())}
