"""The exported names and shapes are the ones SGLang's loaders ask for, target and MTP module.

Written from ``load_weights`` and the module trees of qwen3_next.py, qwen3_next_mtp.py, nemotron_h.py and
nemotron_h_mtp.py, which read the same names in 0.5.17 and 0.5.23.
"""

import pytest
from tinymodels import gdn, mamba2
from tinymodels.registry import MODELS


def attention(prefix: str, *, gated: bool) -> set[str]:
    norms = {f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"} if gated else set()
    return {f"{prefix}.{p}_proj.weight" for p in "qkvo"} | norms


def moe(prefix: str) -> set[str]:
    experts = [f"experts.{e}" for e in range(gdn.EXPERTS)]
    parts = {
        f"{prefix}.{owner}.{p}_proj.weight" for owner in (*experts, "shared_expert") for p in ("gate", "up", "down")
    }
    return parts | {f"{prefix}.gate.weight", f"{prefix}.shared_expert_gate.weight"}


def qwen3_layer(prefix: str, *, full: bool) -> set[str]:
    norms = {f"{prefix}.{n}_layernorm.weight" for n in ("input", "post_attention")}
    linear = (
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "conv1d.weight",
        "A_log",
        "dt_bias",
        "norm.weight",
        "out_proj.weight",
    )
    mixer = attention(f"{prefix}.self_attn", gated=True) if full else {f"{prefix}.linear_attn.{n}" for n in linear}
    return norms | mixer | moe(f"{prefix}.mlp")


def qwen3_next() -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "mtp.norm.weight"}
    names |= {f"mtp.{n}.weight" for n in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    for layer in range(gdn.LAYERS):
        names |= qwen3_layer(f"model.layers.{layer}", full=layer % gdn.INTERVAL == gdn.INTERVAL - 1)
    return names | qwen3_layer("mtp.layers.0", full=True)


def nemotron_h() -> set[str]:
    mixers = {
        "M": {
            "in_proj.weight",
            "conv1d.weight",
            "conv1d.bias",
            "A_log",
            "D",
            "dt_bias",
            "norm.weight",
            "out_proj.weight",
        },
        "*": {f"{p}_proj.weight" for p in "qkvo"},
        "-": {"up_proj.weight", "down_proj.weight"},
    }
    names = {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"}
    for layer, kind in enumerate(mamba2.PATTERN):
        names |= {f"backbone.layers.{layer}.norm.weight"} | {f"backbone.layers.{layer}.mixer.{n}" for n in mixers[kind]}
    step = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight", "final_layernorm.weight"}
    return names | {f"mtp.layers.0.{n}" for n in step} | {f"mtp.layers.0.mixer.{n}" for n in mixers["*"]}


@pytest.mark.parametrize(("name", "expected"), [("gdn", qwen3_next), ("mamba2", nemotron_h)])
def test_names(name, expected):
    assert set(MODELS[name](704).checkpoint_tensors()) == expected()


def test_shapes():
    tensors = MODELS["gdn"](704).checkpoint_tensors()
    assert tensors["mtp.fc.weight"].shape == (256, 512)
    assert tensors["model.layers.0.linear_attn.conv1d.weight"].shape == (512, 1, 4)
    assert tensors["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (256, 64)
    assert tensors["model.layers.3.self_attn.q_proj.weight"].shape == (2 * 4 * 64, 256)
    tensors = MODELS["mamba2"](704).checkpoint_tensors()
    assert tensors["mtp.layers.0.eh_proj.weight"].shape == (256, 512)
    assert tensors["backbone.layers.0.mixer.conv1d.weight"].shape == (768, 1, 4)
    assert tensors["backbone.layers.0.mixer.in_proj.weight"].shape == (512 + 768 + 8, 256)
