"""tiny-gdn: a Qwen3-Next (gated delta net + gated attention + MoE) of about 4 M parameters with its MTP module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymodels.base import TinyModel
from tinymodels.delta_rule import chunk_gated_delta_rule
from tinymodels.layers import Attention, RMSNorm, ShortConv, initialise, log_uniform_dt_bias

HIDDEN, LAYERS, INTERVAL = 256, 4, 4
HEADS, KV_HEADS, HEAD_DIM, ROTARY, THETA = 4, 2, 64, 32, 10_000.0
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 64, 64
EXPERTS, TOP_K, EXPERT_SIZE, SHARED_SIZE = 4, 4, 64, 256


class GatedDeltaNet(nn.Module):
    """Qwen3-Next's linear attention with its packed projections (per key head: q, k, v, z and b, a)."""

    def __init__(self) -> None:
        super().__init__()
        key, value = K_HEADS * K_DIM, V_HEADS * V_DIM
        self.in_proj_qkvz = nn.Linear(HIDDEN, 2 * key + 2 * value, bias=False)
        self.in_proj_ba = nn.Linear(HIDDEN, 2 * V_HEADS, bias=False)
        self.conv1d = ShortConv(2 * key + value)
        self.A_log = nn.Parameter(torch.empty(V_HEADS).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(log_uniform_dt_bias(V_HEADS))
        self.norm = RMSNorm(V_DIM)
        self.out_proj = nn.Linear(value, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        per = V_HEADS // K_HEADS
        packed = self.in_proj_qkvz(x).unflatten(-1, (K_HEADS, -1))
        q, k, v, z = packed.split([K_DIM, K_DIM, per * V_DIM, per * V_DIM], dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (K_HEADS, -1)).split([per, per], dim=-1)
        mixed = self.conv1d(torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1))
        q, k, v = mixed.split([K_HEADS * K_DIM, K_HEADS * K_DIM, V_HEADS * V_DIM], dim=-1)
        q, k = (t.unflatten(-1, (K_HEADS, K_DIM)) for t in (q, k))
        v, z = v.unflatten(-1, (V_HEADS, V_DIM)), z.flatten(2).unflatten(-1, (V_HEADS, V_DIM))
        with torch.autocast(x.device.type, enabled=False):
            beta = b.flatten(2).float().sigmoid()
            g = -self.A_log.float().exp() * F.softplus(a.flatten(2).float() + self.dt_bias.float())
            out = chunk_gated_delta_rule(q, k, v, g, beta)
        out = self.norm(out) * F.silu(z.float())
        return self.out_proj(out.flatten(2).to(x.dtype))


class Experts(nn.Module):
    """All experts' weights, fused: gate_up_proj [E, 2 I, hidden] and down_proj [E, hidden, I]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * EXPERT_SIZE, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, EXPERT_SIZE))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, S, hidden]; weights [B, S, E], zero where not chosen: every expert runs, as two products."""
        gate, up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (EXPERTS, 2, EXPERT_SIZE)).unbind(-2)
        inner = F.silu(gate) * up * weights[..., None].to(x.dtype)
        return F.linear(inner.flatten(2), self.down_proj.transpose(0, 1).flatten(1))


class SharedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, SHARED_SIZE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, SHARED_SIZE, bias=False)
        self.down_proj = nn.Linear(SHARED_SIZE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nn.Module):
    """Softmax routing, renormalised top-k, and a gated shared expert.

    Top-k is all of the few experts: routing stays a smooth function, so that small numeric differences between two
    engines cannot flip an expert and be mistaken for an error in the state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()
        self.shared_expert = SharedExpert()
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).float().softmax(-1)
        top, index = probabilities.topk(TOP_K, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, index, top / top.sum(-1, keepdim=True))
        return self.experts(x, weights) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class Layer(nn.Module):
    def __init__(self, *, full_attention: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN, gemma=True)
        if full_attention:
            self.self_attn = Attention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, gated=True, rotary_dim=ROTARY, theta=THETA)
        else:
            self.linear_attn = GatedDeltaNet()
        self.full_attention = full_attention
        self.post_attention_layernorm = RMSNorm(HIDDEN, gemma=True)
        self.mlp = SparseMoe()

    def forward(self, x: Tensor, memory: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, memory) if self.full_attention else self.linear_attn(normed))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(Layer(full_attention=(i + 1) % INTERVAL == 0) for i in range(LAYERS))
        self.norm = RMSNorm(HIDDEN, gemma=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Mtp(nn.Module):
    """Qwen3-Next's MTP module: ``fc`` over the normed (embedding, hidden), one full-attention layer, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(HIDDEN, gemma=True)
        self.pre_fc_norm_hidden = RMSNorm(HIDDEN, gemma=True)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList([Layer(full_attention=True)])
        self.norm = RMSNorm(HIDDEN, gemma=True)

    def forward(self, embeds: Tensor, hidden: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1))
        return self.norm(self.layers[0](x, memory))


class TinyGdn(TinyModel):
    name = "tiny-gdn"

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = Trunk(vocab_size)
        self.mtp = Mtp()
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)
        initialise(self, LAYERS)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens)

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def draft(self, embeds: Tensor, hidden: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        return self.mtp(embeds, hidden, memory)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The fused experts are split into ``experts.N.{gate,up,down}_proj.weight``."""
        tensors = {}
        for name, tensor in super().checkpoint_tensors().items():
            if name.endswith("experts.gate_up_proj"):
                prefix = name.removesuffix("gate_up_proj")
                for expert, (gate, up) in enumerate(t.chunk(2) for t in tensor.unbind()):
                    tensors[f"{prefix}{expert}.gate_proj.weight"] = gate
                    tensors[f"{prefix}{expert}.up_proj.weight"] = up
            elif name.endswith("experts.down_proj"):
                prefix = name.removesuffix("down_proj")
                tensors |= {f"{prefix}{expert}.down_proj.weight": down for expert, down in enumerate(tensor.unbind())}
            else:
                tensors[name] = tensor
        return tensors

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "full_attention_interval": INTERVAL,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": SHARED_SIZE,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": K_DIM,
            "linear_num_key_heads": K_HEADS,
            "linear_num_value_heads": V_HEADS,
            "linear_value_head_dim": V_DIM,
            "max_position_embeddings": 8192,
            "mlp_only_layers": [],
            "moe_intermediate_size": EXPERT_SIZE,
            "norm_topk_prob": True,
            "num_attention_heads": HEADS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "output_router_logits": False,
            "partial_rotary_factor": ROTARY / HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": THETA,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": SHARED_SIZE,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.lm_head.out_features,
        }
