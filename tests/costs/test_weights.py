"""Parameters counted from configurations, against the tensors of checkpoints and the sizes models are known by."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_mamba_mtp.costs.weights import model_size

MODELS = Path(__file__).parents[2] / "launch" / "models"

QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON_NANO_9B_V2 = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "hidden_size": 4480,
    "vocab_size": 131072,
    "num_hidden_layers": 56,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 15680,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
GRANITE_4_SMALL = {
    "model_type": "granitemoehybrid",
    "tie_word_embeddings": True,
    "hidden_size": 4096,
    "vocab_size": 100352,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}


@pytest.mark.parametrize(
    "config, attention, linear, total, active",
    [
        pytest.param(QWEN3_NEXT_80B, 12, 36, 79.7e9, 3.6e9, id="qwen3-next-80b-a3b"),
        pytest.param(NEMOTRON_NANO_9B_V2, 4, 27, 8.89e9, 8.3e9, id="nemotron-nano-9b-v2"),
        pytest.param(GRANITE_4_SMALL, 4, 36, 32.2e9, 8.8e9, id="granite-4.0-h-small"),
    ],
)
def test_known_models(config, attention, linear, total, active):
    size = model_size(SimpleNamespace(**config), attention_layers=attention, linear_layers=linear)
    assert size.total == pytest.approx(total, rel=0.01)
    assert size.active == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name, attention, linear", [("tiny-gdn", 1, 3), ("tiny-mamba2", 1, 3)])
def test_tiny_models(name, attention, linear):
    """Against the matrices in the file, the MTP head's left out."""
    config = SimpleNamespace(**json.loads((MODELS / name / "config.json").read_text()))
    with (MODELS / name / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    stored = sum(
        (entry["data_offsets"][1] - entry["data_offsets"][0]) // 2
        for key, entry in header.items()
        if key != "__metadata__" and not key.startswith("mtp") and len(entry["shape"]) > 1
    )
    size = model_size(config, attention_layers=attention, linear_layers=linear)
    assert size.total == pytest.approx(stored, rel=0.01)


def test_experts_that_are_touched():
    """One token touches those it chooses, many tokens all of them."""
    size = model_size(SimpleNamespace(**QWEN3_NEXT_80B), attention_layers=12, linear_layers=36)
    assert size.touched(1) == pytest.approx(size.active)
    assert size.touched(1e4) == pytest.approx(size.total - size.embedding)


def test_an_unknown_configuration_is_named():
    with pytest.raises(ValueError, match=r"SimpleNamespace.* has none of vocab_size"):
        model_size(SimpleNamespace(hidden_size=8), attention_layers=1, linear_layers=1)
