"""Tiny second models that draft for the test models: one on its own (STANDALONE), two on the target's states (EAGLE3,
and DFLASH, which drafts a block at once).

The first two have the embedding and the head that a target of the same seed has, so that they lean towards the same
next token, and know nothing else of it: runs of every length are accepted. A block of DFLASH's is accepted by chance
alone; `foresight` sees to it that more is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .weights import HIDDEN, MARKOV, VOCAB, Weights, special_tokens

HEADS = 4
HEAD_DIM = HIDDEN // HEADS
INNER = 96

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **special_tokens(),
}

EAGLE3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
}
"""Reads the target's embeddings and its states behind two of its layers."""

EAGLE3_LAST: dict[str, Any] = {**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}}
"""Reads the target's last hidden states, for models that show no others."""

BLOCK = 16
"""Nodes of a block, the root included."""

DFLASH: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": BLOCK,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]},
}
"""Reads the target's states behind two of its layers, and has neither embedding nor head."""


def _layer(w: Weights, prefix: str, inputs: int, gain: float) -> None:
    for name in ("q", "k", "v"):
        w.linear(f"{prefix}.self_attn.{name}_proj.weight", HIDDEN, inputs)
    w.linear(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HIDDEN, gain)
    w.linear(f"{prefix}.mlp.gate_proj.weight", INNER, HIDDEN)
    w.linear(f"{prefix}.mlp.up_proj.weight", INNER, HIDDEN)
    w.linear(f"{prefix}.mlp.down_proj.weight", HIDDEN, INNER, gain)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        w.near(f"{prefix}.{norm}.weight", 1.0, HIDDEN)


def write_llama(folder: str | Path, seed: int = 0, markov: float = MARKOV) -> Path:
    """Write a Llama of one layer, to draft on its own. Returns the folder."""
    w = Weights(seed)
    w.embedding_and_head("model.embed_tokens.weight", "lm_head.weight", markov)
    _layer(w, "model.layers.0", HIDDEN, 0.3)
    w.near("model.norm.weight", 1.0, HIDDEN)
    return w.save(Path(folder), LLAMA)


def write_eagle3(folder: str | Path, seed: int = 0, markov: float = MARKOV, *, config: dict[str, Any] = EAGLE3) -> Path:
    """Write an EAGLE3 head, by ``config`` of either kind. Returns the folder.

    Its layer sees the last token in attention only: queries, keys and values copy the embedding, so that a token
    attends to itself above all and hands its embedding on.
    """
    w = Weights(seed)
    w.embedding_and_head("embed_tokens.weight", "lm_head.weight", markov)
    del w.tensors["embed_tokens.weight"]  # the target's
    w.linear("fc.weight", HIDDEN, 3 * HIDDEN, 0.3)
    _layer(w, "midlayer", 2 * HIDDEN, 0.3)
    copy = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    for name, gain in (("q", 2.0), ("k", 2.0), ("v", 1.0)):
        w.tensors[f"midlayer.self_attn.{name}_proj.weight"] = gain * copy
    w.tensors["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    w.near("midlayer.hidden_norm.weight", 1.0, HIDDEN)
    w.near("norm.weight", 1.0, HIDDEN)
    return w.save(Path(folder), config)


def write_dflash(folder: str | Path, seed: int = 0) -> Path:
    """Write a DFLASH draft of one layer. Returns the folder."""
    w = Weights(seed)
    w.linear("fc.weight", HIDDEN, len(DFLASH["dflash_config"]["target_layer_ids"]) * HIDDEN)
    _layer(w, "layers.0", HIDDEN, 0.3)
    for norm in ("q_norm", "k_norm"):
        w.near(f"layers.0.self_attn.{norm}.weight", 1.0, HEAD_DIM)
    for norm in ("hidden_norm", "norm"):
        w.near(f"{norm}.weight", 1.0, HIDDEN)
    return w.save(Path(folder), DFLASH)


WRITERS: dict[str, Callable[..., Path]] = {
    "STANDALONE": write_llama,
    "EAGLE3": write_eagle3,
    "EAGLE3-last": partial(write_eagle3, config=EAGLE3_LAST),
    "DFLASH": write_dflash,
}
"""By draft algorithm, and what the draft reads."""
