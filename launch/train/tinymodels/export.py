"""Write a trained model as a checkpoint folder that SGLang and Transformers load."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tinymodels import tokenizer as tok
from tinymodels.base import TinyModel

FLOAT32 = ("A_log",)


def round_to_bfloat16(model: TinyModel) -> None:
    """Round the weights in place to what the checkpoint will hold, so that an evaluation is of the checkpoint."""
    for name, parameter in model.named_parameters():
        if not name.endswith(FLOAT32):
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)


def save(model: TinyModel, tokenizer: Tokenizer, tokenizer_folder: Path, folder: Path) -> None:
    """Weights (bf16; A_log float32), config.json, generation_config.json and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).contiguous().clone()
        for name, tensor in model.checkpoint_tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    pad, end = tokenizer.token_to_id(tok.PAD), tokenizer.token_to_id(tok.END)
    tokens = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    config = dict(sorted({**model.config(), **tokens, "torch_dtype": "bfloat16"}.items()))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": pad})
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(tokenizer_folder / name, folder / name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
