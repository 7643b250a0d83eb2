"""Tiny random-weight checkpoints for CPU tests: a Qwen3-Next (GDN) and a Nemotron-H (Mamba2), each with an MTP layer.

`write_qwen3_next(folder, seed)` and `write_nemotron_h(folder, seed)` write `config.json` and `model.safetensors` in the
checkpoint format of the released models, so SGLang and transformers both load them. float32, no tokenizer (serve with
`skip_tokenizer_init`, prompts as token ids below `VOCAB`). `more_models.py` has the other models of both families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from .weights import HIDDEN, MARKOV, VOCAB, Weights, special_tokens

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **special_tokens(),
}


def _qwen_attention(w: Weights, prefix: str, gain: float) -> None:
    heads, kv_heads, dim = (QWEN3_NEXT[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    w.linear(f"{prefix}.q_proj.weight", heads * dim * 2, HIDDEN)
    w.linear(f"{prefix}.k_proj.weight", kv_heads * dim, HIDDEN)
    w.linear(f"{prefix}.v_proj.weight", kv_heads * dim, HIDDEN)
    w.linear(f"{prefix}.o_proj.weight", HIDDEN, heads * dim, gain)
    w.near(f"{prefix}.q_norm.weight", 0.0, dim)
    w.near(f"{prefix}.k_norm.weight", 0.0, dim)


def _qwen_moe(w: Weights, prefix: str, gain: float) -> None:
    inner = QWEN3_NEXT["moe_intermediate_size"]
    w.linear(f"{prefix}.gate.weight", QWEN3_NEXT["num_experts"], HIDDEN)
    experts = [f"{prefix}.experts.{i}" for i in range(QWEN3_NEXT["num_experts"])]
    for expert in [*experts, f"{prefix}.shared_expert"]:
        w.linear(f"{expert}.gate_proj.weight", inner, HIDDEN)
        w.linear(f"{expert}.up_proj.weight", inner, HIDDEN)
        w.linear(f"{expert}.down_proj.weight", HIDDEN, inner, gain)
    w.linear(f"{prefix}.shared_expert_gate.weight", 1, HIDDEN)


def _qwen_gdn(w: Weights, prefix: str, gain: float) -> None:
    heads, v_heads = QWEN3_NEXT["linear_num_key_heads"], QWEN3_NEXT["linear_num_value_heads"]
    dim, v_dim = QWEN3_NEXT["linear_key_head_dim"], QWEN3_NEXT["linear_value_head_dim"]
    conv_dim = 2 * heads * dim + v_heads * v_dim
    w.linear(f"{prefix}.in_proj_qkvz.weight", conv_dim + v_heads * v_dim, HIDDEN)
    w.linear(f"{prefix}.in_proj_ba.weight", 2 * v_heads, HIDDEN)
    w.normal(f"{prefix}.conv1d.weight", conv_dim, 1, QWEN3_NEXT["linear_conv_kernel_dim"], std=0.5)
    # Decay per token exp(-exp(A_log) softplus(a + dt_bias)), about 0.97 to 0.5: memory of tens of tokens.
    w.uniform(f"{prefix}.A_log", -3.0, 0.0, v_heads)
    w.uniform(f"{prefix}.dt_bias", -1.0, 1.0, v_heads)
    w.near(f"{prefix}.norm.weight", 1.0, v_dim)
    w.linear(f"{prefix}.out_proj.weight", HIDDEN, v_heads * v_dim, gain)


def write_qwen3_next(folder: str | Path, seed: int = 0, markov: float = MARKOV) -> Path:
    """Write a Qwen3-Next of two GDN layers and one attention layer, MoE everywhere, and its MTP layer.

    Returns:
        the folder, for `model_path` and (same folder) the MTP draft.
    """
    w = Weights(seed)
    w.embedding_and_head("model.embed_tokens.weight", "lm_head.weight", markov)

    def layer(prefix: str, mixer: Callable[[Weights, str, float], None], name: str) -> None:
        w.near(f"{prefix}.input_layernorm.weight", 0.0, HIDDEN)
        mixer(w, f"{prefix}.{name}", 1.0)
        w.near(f"{prefix}.post_attention_layernorm.weight", 0.0, HIDDEN)
        _qwen_moe(w, f"{prefix}.mlp", 0.7)

    for i in range(QWEN3_NEXT["num_hidden_layers"]):
        if (i + 1) % QWEN3_NEXT["full_attention_interval"]:
            layer(f"model.layers.{i}", _qwen_gdn, "linear_attn")
        else:
            layer(f"model.layers.{i}", _qwen_attention, "self_attn")
    w.near("model.norm.weight", 0.0, HIDDEN)

    w.mix("mtp.fc.weight", keep=1.0, gain=0.3)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        w.near(f"mtp.{norm}.weight", 0.0, HIDDEN)
    layer("mtp.layers.0", lambda w, prefix, gain: _qwen_attention(w, prefix, 0.3), "self_attn")
    return w.save(Path(folder), QWEN3_NEXT)


def write_wide_qwen3_next(folder: str | Path) -> Path:
    """The same in bfloat16 with GDN heads as wide as real models', which FlashInfer's kernels need."""
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "torch_dtype": "bfloat16"}
    with mock.patch.dict(QWEN3_NEXT, wide):
        return write_qwen3_next(folder)


NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    # num_hidden_layers is derived from the pattern. transformers reads the names with mamba_ too, SGLang mostly those;
    # n_groups it reads under both names.
    "hybrid_override_pattern": "M-M*M",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "use_mamba_kernels": False,
    "ssm_state_size": 24,
    "mamba_num_heads": 4,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_head_dim": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 1,
    "mamba_hidden_act": "silu",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_chunk_size": 64,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **special_tokens(),
}


def _nemotron_attention(w: Weights, prefix: str, gain: float) -> None:
    heads, kv_heads, dim = (NEMOTRON_H[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    w.linear(f"{prefix}.q_proj.weight", heads * dim, HIDDEN)
    w.linear(f"{prefix}.k_proj.weight", kv_heads * dim, HIDDEN)
    w.linear(f"{prefix}.v_proj.weight", kv_heads * dim, HIDDEN)
    w.linear(f"{prefix}.o_proj.weight", HIDDEN, heads * dim, gain)


def _nemotron_mamba2(w: Weights, prefix: str, gain: float) -> None:
    heads, dim = NEMOTRON_H["mamba_num_heads"], NEMOTRON_H["mamba_head_dim"]
    inner = heads * dim
    conv_dim = inner + 2 * NEMOTRON_H["mamba_n_groups"] * NEMOTRON_H["ssm_state_size"]
    w.linear(f"{prefix}.in_proj.weight", inner + conv_dim + heads, HIDDEN)
    w.normal(f"{prefix}.conv1d.weight", conv_dim, 1, NEMOTRON_H["mamba_d_conv"], std=0.5)
    w.normal(f"{prefix}.conv1d.bias", conv_dim, std=0.1)
    # Decay per token exp(-exp(A_log) softplus(dt + dt_bias)), about 0.97 to 0.5.
    w.uniform(f"{prefix}.A_log", -3.0, 0.0, heads)
    w.uniform(f"{prefix}.dt_bias", -1.0, 1.0, heads)
    w.near(f"{prefix}.D", 1.0, heads)
    w.near(f"{prefix}.norm.weight", 1.0, inner)
    w.linear(f"{prefix}.out_proj.weight", HIDDEN, inner, gain)


def _nemotron_mlp(w: Weights, prefix: str, gain: float) -> None:
    w.linear(f"{prefix}.up_proj.weight", NEMOTRON_H["intermediate_size"], HIDDEN)
    w.linear(f"{prefix}.down_proj.weight", HIDDEN, NEMOTRON_H["intermediate_size"], gain)


def _nemotron_experts(w: Weights, prefix: str, gain: float) -> None:
    w.linear(f"{prefix}.gate.weight", NEMOTRON_H["n_routed_experts"], HIDDEN)
    w.normal(f"{prefix}.gate.e_score_correction_bias", NEMOTRON_H["n_routed_experts"], std=0.1)
    names = [f"experts.{i}" for i in range(NEMOTRON_H["n_routed_experts"])]
    for name in (*names, "shared_experts"):
        w.linear(f"{prefix}.{name}.up_proj.weight", NEMOTRON_H["moe_intermediate_size"], HIDDEN)
        w.linear(f"{prefix}.{name}.down_proj.weight", HIDDEN, NEMOTRON_H["moe_intermediate_size"], gain)


NEMOTRON_MIXERS = {"M": _nemotron_mamba2, "*": _nemotron_attention, "-": _nemotron_mlp, "E": _nemotron_experts}

NEMOTRON_EXPERTS: dict[str, Any] = {
    "hybrid_override_pattern": "ME-M*M",
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
"""What a Nemotron-H with experts has besides, and otherwise: a draft that ends in experts, as real models' do."""


def write_nemotron_h_experts(folder: str | Path) -> Path:
    """The same with a layer of experts, and one more at the end of the draft."""
    with mock.patch.dict(NEMOTRON_H, NEMOTRON_EXPERTS):
        return write_nemotron_h(folder)


def write_nemotron_h(folder: str | Path, seed: int = 0, markov: float = MARKOV) -> Path:
    """Write a Nemotron-H of three Mamba2 layers, one MLP and one attention layer, and its MTP layer (attention).

    Returns:
        the folder, for `model_path` and (same folder) the MTP draft.
    """
    w = Weights(seed)
    w.embedding_and_head("backbone.embeddings.weight", "lm_head.weight", markov)
    for i, kind in enumerate(NEMOTRON_H["hybrid_override_pattern"]):
        w.near(f"backbone.layers.{i}.norm.weight", 1.0, HIDDEN)
        NEMOTRON_MIXERS[kind](w, f"backbone.layers.{i}.mixer", 1.0)
    w.near("backbone.norm_f.weight", 1.0, HIDDEN)

    drafts = NEMOTRON_H["mtp_hybrid_override_pattern"]
    w.mix("mtp.layers.0.eh_proj.weight", keep=1.0, gain=0.3)
    for norm in ("0.enorm", "0.hnorm", "0.norm", f"{len(drafts) - 1}.final_layernorm"):
        w.near(f"mtp.layers.{norm}.weight", 1.0, HIDDEN)
    for i, kind in enumerate(drafts):
        if i:
            w.near(f"mtp.layers.{i}.norm.weight", 1.0, HIDDEN)
        NEMOTRON_MIXERS[kind](w, f"mtp.layers.{i}.mixer", 0.3)
    return w.save(Path(folder), NEMOTRON_H)


WRITERS: dict[str, Callable[..., Path]] = {"gdn": write_qwen3_next, "mamba2": write_nemotron_h}
