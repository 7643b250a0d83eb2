"""Parameters of a hybrid model, counted from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, over all layers and ranks.

    Attributes
        layers: decoder layers.
        embedding: the input embedding, of which a step reads next to nothing.
        head: the output projection (the embedding once more where they are tied).
        shared: what every token goes through: mixers, dense MLPs, shared experts, routers.
        expert: one routed expert of one layer; 0 in a dense model.
        moe_layers: layers with routed experts.
        experts: routed experts in each of them.
        chosen: how many of them a token takes.
        tied: whether ``head`` is stored as ``embedding`` only.
    """

    layers: int
    embedding: int
    head: int
    shared: int
    expert: int = 0
    moe_layers: int = 0
    experts: int = 0
    chosen: int = 0
    tied: bool = False

    @property
    def total(self) -> int:
        """All parameters that are stored."""
        return (0 if self.tied else self.embedding) + self.head + self.shared + self._routed(self.experts)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.head + self.shared + self._routed(self.chosen)

    def touched(self, tokens: float) -> float:
        """Parameters a forward of ``tokens`` tokens reads, their experts being spread evenly."""
        missed = (1 - self.chosen / self.experts) ** tokens if self.experts else 1.0
        return self.head + self.shared + self._routed(self.experts) * (1 - missed)

    def one_layer(self) -> ModelSize:
        """An average layer and the head: about what one step of an MTP head reads."""
        routed = min(1, self.moe_layers)
        return ModelSize(
            1, 0, self.head, self.shared // self.layers, self.expert, routed, self.experts, self.chosen, tied=True
        )

    def _routed(self, experts: int) -> int:
        return self.moe_layers * experts * self.expert


def model_size(config: Any, *, attention_layers: int, linear_layers: int) -> ModelSize:
    """Count the parameters of a Hugging Face text configuration of one of the families served here.

    Norms, biases and other vectors are left out.

    Args
        config: its attributes are read under the names the families use.
        attention_layers, linear_layers: how many layers have which kind of mixer (both in Falcon-H1).

    Raises
        ValueError: a size is under none of the names known here.
    """
    hidden, vocab = _one(config, "hidden_size"), _one(config, "vocab_size")
    layers = _one(config, "num_hidden_layers")
    shared = attention_layers * _attention(config, hidden) + linear_layers * _mixer(config, hidden)
    # In Nemotron-H a layer is a mixer or an MLP; elsewhere every layer has both.
    alternating = getattr(config, "model_type", None) == "nemotron_h"
    feed_forward = layers - attention_layers - linear_layers if alternating else layers
    matrices = 2 if getattr(config, "mlp_hidden_act", None) == "relu2" else 3

    experts = _maybe(config, "num_experts", "num_local_experts", "n_routed_experts")
    moe_layers = _moe_blocks(config) if alternating else feed_forward if experts else 0
    expert = 0
    if moe_layers:
        expert = matrices * hidden * _one(config, "moe_intermediate_size", "intermediate_size")
        beside = _maybe(
            config,
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        )
        shared += moe_layers * hidden * (matrices * beside + experts)
    dense = feed_forward - moe_layers
    if dense:
        shared += dense * matrices * hidden * _one(config, "intermediate_size")
    return ModelSize(
        layers=layers,
        embedding=vocab * hidden,
        head=vocab * hidden,
        shared=shared,
        expert=expert,
        moe_layers=moe_layers,
        experts=experts if moe_layers else 0,
        chosen=_one(config, "num_experts_per_tok") if moe_layers else 0,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _moe_blocks(config: Any) -> int:
    """Layers with routed experts in Nemotron-H: "E" in its pattern, "moe" in the list that came to replace it."""
    pattern = getattr(config, "hybrid_override_pattern", None)
    return str(pattern).count("E") if pattern else list(getattr(config, "layers_block_type", ())).count("moe")


def _attention(config: Any, hidden: int) -> int:
    heads = _one(config, "num_attention_heads")
    kv_heads = _one(config, "num_key_value_heads")
    head = _maybe(config, "head_dim", "attention_head_dim") or hidden // heads
    gated = str(getattr(config, "model_type", "")).startswith(("qwen3_next", "qwen3_5"))
    return hidden * head * (heads * (3 if gated else 2) + 2 * kv_heads)


def _mixer(config: Any, hidden: int) -> int:
    if hasattr(config, "linear_num_value_heads"):
        keys = _one(config, "linear_key_head_dim") * _one(config, "linear_num_key_heads")
        heads = _one(config, "linear_num_value_heads")
        values = _one(config, "linear_value_head_dim") * heads
        kernel = _one(config, "linear_conv_kernel_dim")
        return hidden * (2 * keys + 3 * values + 2 * heads) + kernel * (2 * keys + values)
    heads = _one(config, "mamba_num_heads", "mamba_n_heads")
    inner = heads * _one(config, "mamba_head_dim", "mamba_d_head")
    groups = 2 * _one(config, "n_groups", "mamba_n_groups") * _one(config, "ssm_state_size", "mamba_d_state")
    kernel = _one(config, "conv_kernel", "mamba_d_conv")
    return hidden * (3 * inner + groups + heads) + kernel * (inner + groups)


def _maybe(config: Any, *names: str) -> int:
    """The first of ``names`` that the configuration has, or 0."""
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), 0)


def _one(config: Any, *names: str) -> int:
    value = _maybe(config, *names)
    if not value:
        raise ValueError(f"the model's configuration ({type(config).__name__}) has none of {', '.join(names)}")
    return value
