"""A model folder from launch/shapes: configuration and tokenizer, no weights (``--load-format dummy`` makes them).

bench_serving takes its random prompts from the tokenizer's ids and reads every token back as text. So a shape's
tokenizer has a word for each id of the model's vocabulary, ``t0`` to ``t<vocabulary - 1>``, and nothing special: no id
lies beyond the model's embedding and none is silent.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .modes import text_config

#: Where `make` puts the tokenizer: beside no config.json, by which transformers would pick the model's own class.
TOKENIZER = "tokenizer"


def make(shape: Path, folder: Path) -> Path:
    """Fill ``folder`` with what a server and bench_serving read of ``shape``; returns it. A second call is cheap."""
    tokenizer = folder / TOKENIZER
    tokenizer.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shape / "config.json", folder / "config.json")
    if not (tokenizer / "tokenizer_config.json").is_file():
        config = json.loads((shape / "config.json").read_text())
        words = word_tokenizer(text_config(config)["vocab_size"])
        (tokenizer / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**9}
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def flags(folder: Path | str) -> list[str]:
    """What a server is started with on top, where its model is a ``folder`` that `make` has filled."""
    return ["--load-format", "dummy", "--tokenizer-path", str(Path(folder) / TOKENIZER)]


def word_tokenizer(size: int) -> dict[str, Any]:
    """A tokenizer.json whose ids 0 .. ``size`` - 1 are the words t0, t1, ..."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{number}": number for number in range(size)}, "unk_token": "t0"},
    }
