"""Tiny random-weight checkpoints of the other models that use SGLang's GDN and Mamba2 backends.

`WRITERS[name](folder)` writes one, in the released models' checkpoint format, with what sets the model apart:

* `granite4`: Granite 4 hybrid (GraniteMoeHybrid): mixture of experts beside a shared MLP, scaled residuals, one group.
* `falcon_h1`: attention and Mamba2 in parallel in every layer, muP multipliers on the mixer's projection, no norm after
  the gate; `falcon_h1_normed`: several groups and a norm.
* `nemotron_h_experts`: Nemotron-H with experts in a layer of its own and at the end of its MTP layer (Nemotron 3).
* `mamba2`: Mamba-Codestral type: Mamba2 layers and nothing else, not even attention (SGLang 0.5.23).
* `qwen3_5`: the multimodal class the released Qwen3.5 checkpoints name (its vision tower is never run), three value
  heads per key head, with an MTP layer; `qwen3_5_moe`: the same with experts, two value heads per key head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .models import write_nemotron_h_experts
from .weights import HIDDEN, MARKOV, VOCAB, Weights, special_tokens

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **special_tokens(),
}

HEAD_DIM = 16
CONV = 4


def _attention(w: Weights, prefix: str, gain: float, gated: bool = False) -> None:
    """q, k, v, o projections; with ``gated`` q carries its output gate."""
    heads, kv_heads = COMMON["num_attention_heads"], COMMON["num_key_value_heads"]
    w.linear(f"{prefix}.q_proj.weight", heads * HEAD_DIM * (1 + gated), HIDDEN)
    w.linear(f"{prefix}.k_proj.weight", kv_heads * HEAD_DIM, HIDDEN)
    w.linear(f"{prefix}.v_proj.weight", kv_heads * HEAD_DIM, HIDDEN)
    w.linear(f"{prefix}.o_proj.weight", HIDDEN, heads * HEAD_DIM, gain)


def _mlp(w: Weights, prefix: str, inner: int, gain: float) -> None:
    w.linear(f"{prefix}.gate_proj.weight", inner, HIDDEN)
    w.linear(f"{prefix}.up_proj.weight", inner, HIDDEN)
    w.linear(f"{prefix}.down_proj.weight", HIDDEN, inner, gain)


def _mamba2(
    w: Weights, prefix: str, *, heads: int, head_dim: int, groups: int, state: int, norm: bool = True, gain: float = 1.0
) -> None:
    """A Mamba2 mixer. Every call draws its own A: fold and verify must use the right layer's."""
    inner = heads * head_dim
    conv_dim = inner + 2 * groups * state
    w.linear(f"{prefix}.in_proj.weight", inner + conv_dim + heads, HIDDEN)
    w.normal(f"{prefix}.conv1d.weight", conv_dim, 1, CONV, std=0.5)
    w.normal(f"{prefix}.conv1d.bias", conv_dim, std=0.1)
    w.uniform(f"{prefix}.A_log", -3.0, 0.0, heads)
    w.uniform(f"{prefix}.dt_bias", -1.0, 1.0, heads)
    w.near(f"{prefix}.D", 1.0, heads)
    if norm:
        w.near(f"{prefix}.norm.weight", 1.0, inner)
    w.linear(f"{prefix}.out_proj.weight", HIDDEN, inner, gain)


# --------------------------------------------------------------------------------------------------------- Granite 4

GRANITE4: dict[str, Any] = {
    **COMMON,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "position_embedding_type": "nope",
    "attention_bias": False,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_conv": CONV,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 32,
    "embedding_multiplier": 1.5,
    "logits_scaling": 0.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.8,
}


def write_granite4(folder: str | Path, seed: int = 0, markov: float = MARKOV) -> Path:
    """Write a Granite 4 hybrid of three Mamba2 layers and one attention layer, experts and a shared MLP everywhere."""
    w = Weights(seed)
    w.embedding_and_head("model.embed_tokens.weight", "lm_head.weight", markov)
    experts, inner, shared = (
        GRANITE4[key] for key in ("num_local_experts", "intermediate_size", "shared_intermediate_size")
    )
    for i, kind in enumerate(GRANITE4["layer_types"]):
        layer = f"model.layers.{i}"
        w.near(f"{layer}.input_layernorm.weight", 1.0, HIDDEN)
        if kind == "mamba":
            _mamba2(w, f"{layer}.mamba", heads=8, head_dim=16, groups=1, state=24)
        else:
            _attention(w, f"{layer}.self_attn", 1.0)
        w.near(f"{layer}.post_attention_layernorm.weight", 1.0, HIDDEN)
        w.linear(f"{layer}.block_sparse_moe.router.layer.weight", experts, HIDDEN)
        w.normal(f"{layer}.block_sparse_moe.input_linear.weight", experts, 2 * inner, HIDDEN, std=HIDDEN**-0.5)
        w.normal(f"{layer}.block_sparse_moe.output_linear.weight", experts, HIDDEN, inner, std=0.7 * inner**-0.5)
        w.linear(f"{layer}.shared_mlp.input_linear.weight", 2 * shared, HIDDEN)
        w.linear(f"{layer}.shared_mlp.output_linear.weight", HIDDEN, shared, 0.7)
    w.near("model.norm.weight", 1.0, HIDDEN)
    return w.save(Path(folder), GRANITE4)


# --------------------------------------------------------------------------------------------------------- Falcon-H1

FALCON_H1: dict[str, Any] = {
    **COMMON,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 3,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_d_conv": CONV,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": False,
    # No two factors alike, so that a factor on the wrong part of the projection changes the outputs.
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.2, 0.8],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.7],
    "embedding_multiplier": 1.4,
    "lm_head_multiplier": 1.5,
}


def write_falcon_h1(folder: str | Path, seed: int = 0, markov: float = 0.9, *, normed: bool = False) -> Path:
    """Write a Falcon-H1 of three layers, each attention and Mamba2 side by side.

    ``normed``: gated RMS norm over two groups, instead of a gate alone and one group.
    """
    w = Weights(seed)
    groups = 2 if normed else 1
    config = {**FALCON_H1, "mamba_n_groups": groups, "mamba_rms_norm": normed}
    w.embedding_and_head("model.embed_tokens.weight", "lm_head.weight", markov)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        w.near(f"{layer}.input_layernorm.weight", 1.0, HIDDEN)
        _mamba2(w, f"{layer}.mamba", heads=6, head_dim=16, groups=groups, state=24, norm=normed)
        _attention(w, f"{layer}.self_attn", 0.7)
        w.near(f"{layer}.pre_ff_layernorm.weight", 1.0, HIDDEN)
        _mlp(w, f"{layer}.feed_forward", config["intermediate_size"], 0.7)
    w.near("model.final_layernorm.weight", 1.0, HIDDEN)
    return w.save(Path(folder), config)


# ------------------------------------------------------------------------------------------------------- pure Mamba2

MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 24,
    "n_groups": 2,
    "conv_kernel": CONV,
    "expand": 2,
    "chunk_size": 16,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "rms_norm": True,
    "norm_before_gate": False,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **special_tokens(),
}


def write_mamba2(folder: str | Path, seed: int = 0, markov: float = MARKOV) -> Path:
    """Write a Mamba2 of three layers without attention."""
    w = Weights(seed)
    w.embedding_and_head("backbone.embeddings.weight", "lm_head.weight", markov)
    for i in range(MAMBA2["num_hidden_layers"]):
        w.near(f"backbone.layers.{i}.norm.weight", 1.0, HIDDEN)
        _mamba2(w, f"backbone.layers.{i}.mixer", heads=8, head_dim=16, groups=2, state=24)
    w.near("backbone.norm_f.weight", 1.0, HIDDEN)
    return w.save(Path(folder), MAMBA2)


# ----------------------------------------------------------------------------------------------------------- Qwen3.5

QWEN3_5_TEXT: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "attn_output_gate": True,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_conv_kernel_dim": CONV,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "mtp_num_hidden_layers": 1,
}

QWEN3_5_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _gdn(w: Weights, prefix: str, value_heads: int) -> None:
    heads, dim, value_dim = (
        QWEN3_5_TEXT[key] for key in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
    )
    inner = value_heads * value_dim
    conv_dim = 2 * heads * dim + inner
    w.linear(f"{prefix}.in_proj_qkv.weight", conv_dim, HIDDEN)
    w.linear(f"{prefix}.in_proj_z.weight", inner, HIDDEN)
    w.linear(f"{prefix}.in_proj_b.weight", value_heads, HIDDEN)
    w.linear(f"{prefix}.in_proj_a.weight", value_heads, HIDDEN)
    w.normal(f"{prefix}.conv1d.weight", conv_dim, 1, CONV, std=0.5)
    w.uniform(f"{prefix}.A_log", -3.0, 0.0, value_heads)
    w.uniform(f"{prefix}.dt_bias", -1.0, 1.0, value_heads)
    w.near(f"{prefix}.norm.weight", 1.0, value_dim)
    w.linear(f"{prefix}.out_proj.weight", HIDDEN, inner)


def _qwen_experts(w: Weights, prefix: str, gain: float) -> None:
    """Experts as the released checkpoints store them: all of a layer in two tensors."""
    experts, inner = EXPERTS["num_experts"], EXPERTS["moe_intermediate_size"]
    w.linear(f"{prefix}.gate.weight", experts, HIDDEN)
    w.normal(f"{prefix}.experts.gate_up_proj", experts, 2 * inner, HIDDEN, std=HIDDEN**-0.5)
    w.normal(f"{prefix}.experts.down_proj", experts, HIDDEN, inner, std=gain * inner**-0.5)
    _mlp(w, f"{prefix}.shared_expert", EXPERTS["shared_expert_intermediate_size"], gain)
    w.linear(f"{prefix}.shared_expert_gate.weight", 1, HIDDEN)


def write_qwen3_5(folder: str | Path, seed: int = 0, markov: float = MARKOV, *, moe: bool = False) -> Path:
    """Write a Qwen3.5 of three GDN layers and one attention layer, and its MTP layer; no weights for the vision tower.

    ``moe``: experts in every layer, and two value heads per key head instead of three.
    """
    value_heads = 4 if moe else 6
    suffix = "_moe" if moe else ""
    text = {**QWEN3_5_TEXT, "model_type": f"qwen3_5{suffix}_text", "linear_num_value_heads": value_heads}
    config = {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": f"qwen3_5{suffix}",
        "text_config": text | (EXPERTS if moe else {}),
        "vision_config": {**QWEN3_5_VISION, "model_type": f"qwen3_5{suffix}"},
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        # Of tokens no prompt contains.
        "image_token_id": VOCAB - 2,
        "video_token_id": VOCAB - 3,
        "vision_start_token_id": VOCAB - 4,
        "vision_end_token_id": VOCAB - 5,
        **special_tokens(),
    }
    w = Weights(seed)
    w.embedding_and_head("model.language_model.embed_tokens.weight", "lm_head.weight", markov)

    def attention(prefix: str, gain: float) -> None:
        _attention(w, prefix, gain, gated=True)
        w.near(f"{prefix}.q_norm.weight", 0.0, HEAD_DIM)
        w.near(f"{prefix}.k_norm.weight", 0.0, HEAD_DIM)

    def layer(prefix: str, mixer: Callable[[], None]) -> None:
        w.near(f"{prefix}.input_layernorm.weight", 0.0, HIDDEN)
        mixer()
        w.near(f"{prefix}.post_attention_layernorm.weight", 0.0, HIDDEN)
        if moe:
            _qwen_experts(w, f"{prefix}.mlp", 0.7)
        else:
            _mlp(w, f"{prefix}.mlp", text["intermediate_size"], 0.7)

    for i in range(text["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{i}"
        if (i + 1) % text["full_attention_interval"]:
            layer(prefix, partial(_gdn, w, f"{prefix}.linear_attn", value_heads))
        else:
            layer(prefix, partial(attention, f"{prefix}.self_attn", 1.0))
    w.near("model.language_model.norm.weight", 0.0, HIDDEN)

    w.mix("mtp.fc.weight", keep=1.0, gain=0.3)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        w.near(f"mtp.{norm}.weight", 0.0, HIDDEN)
    layer("mtp.layers.0", partial(attention, "mtp.layers.0.self_attn", 0.3))
    return w.save(Path(folder), config)


WRITERS: dict[str, Callable[..., Path]] = {
    "granite4": write_granite4,
    "falcon_h1": write_falcon_h1,
    "falcon_h1_normed": partial(write_falcon_h1, normed=True),
    "nemotron_h_experts": write_nemotron_h_experts,
    "mamba2": write_mamba2,
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": partial(write_qwen3_5, moe=True),
}
