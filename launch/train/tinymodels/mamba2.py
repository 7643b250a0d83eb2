"""tiny-mamba2: a Nemotron-H (Mamba2, attention and MLP blocks) of about 4 M parameters with its MTP module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymodels.base import TinyModel
from tinymodels.layers import Attention, RMSNorm, ShortConv, initialise, log_uniform_dt_bias
from tinymodels.ssd import chunk_ssm

HIDDEN, PATTERN, MTP_PATTERN = 256, "M-M*-M-", "*"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SSM_HEADS, SSM_HEAD_DIM, STATE, GROUPS = 8, 64, 64, 2
MLP_SIZE, EPS = 768, 1e-5


class Mamba2Mixer(nn.Module):
    """in_proj -> (gate, x B C, dt) -> short conv -> scan -> grouped gated norm -> out_proj."""

    def __init__(self) -> None:
        super().__init__()
        inner, groups = SSM_HEADS * SSM_HEAD_DIM, GROUPS * STATE
        self.in_proj = nn.Linear(HIDDEN, 2 * inner + 2 * groups + SSM_HEADS, bias=False)
        self.conv1d = ShortConv(inner + 2 * groups, bias=True)
        self.A_log = nn.Parameter(torch.empty(SSM_HEADS).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(SSM_HEADS))
        self.dt_bias = nn.Parameter(log_uniform_dt_bias(SSM_HEADS))
        self.norm = GroupedGatedNorm(inner)
        self.out_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        inner, groups = SSM_HEADS * SSM_HEAD_DIM, GROUPS * STATE
        gate, mixed, dt = self.in_proj(u).split([inner, inner + 2 * groups, SSM_HEADS], dim=-1)
        x, b, c = self.conv1d(mixed).split([inner, groups, groups], dim=-1)
        x = x.unflatten(-1, (SSM_HEADS, SSM_HEAD_DIM))
        b, c = (t.unflatten(-1, (GROUPS, STATE)) for t in (b, c))
        with torch.autocast(u.device.type, enabled=False):
            dt = F.softplus(dt.float() + self.dt_bias.float())
            y = chunk_ssm(x, dt, -self.A_log.float().exp(), b, c) + self.D.float()[:, None] * x.float()
        return self.out_proj(self.norm(y.flatten(2), gate).to(u.dtype))


class GroupedGatedNorm(nn.Module):
    """RMSNorm of ``x * silu(gate)`` in GROUPS groups: [B, S, inner] -> [B, S, inner] float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = (x.float() * F.silu(gate.float())).unflatten(-1, (GROUPS, -1))
        return F.rms_norm(x, x.shape[-1:], eps=EPS).flatten(-2) * self.weight.float()


class SquaredReluMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, MLP_SIZE, bias=False)
        self.down_proj = nn.Linear(MLP_SIZE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


def attention() -> Attention:
    return Attention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, gated=False)


MIXERS = {"M": Mamba2Mixer, "*": attention, "-": SquaredReluMlp}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN, eps=EPS)
        self.mixer = MIXERS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(Block(kind) for kind in PATTERN)
        self.norm_f = RMSNorm(HIDDEN, eps=EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class MtpBlock(nn.Module):
    """Nemotron-H's MTP step with the pattern ``*``: eh_proj over the normed (embedding, hidden), attention, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm = RMSNorm(HIDDEN, eps=EPS)
        self.hnorm = RMSNorm(HIDDEN, eps=EPS)
        self.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norm = RMSNorm(HIDDEN, eps=EPS)
        self.mixer = attention()
        self.final_layernorm = RMSNorm(HIDDEN, eps=EPS)

    def forward(self, embeds: Tensor, hidden: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        return self.final_layernorm(x + self.mixer(self.norm(x), memory))


class Mtp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MtpBlock()])


class TinyMamba2(TinyModel):
    name = "tiny-mamba2"

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.backbone = Backbone(vocab_size)
        self.mtp = Mtp()
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)
        initialise(self, len(PATTERN))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.backbone.embeddings(tokens)

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.backbone(tokens)

    def draft(self, embeds: Tensor, hidden: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        return self.mtp.layers[0](embeds, hidden, memory)

    def config(self) -> dict[str, Any]:
        """SGLang's names and Transformers' where they differ: both read the file."""
        return {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "chunk_size": 128,
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": HEAD_DIM,
            "hidden_dropout": 0.0,
            "hidden_size": HIDDEN,
            "hybrid_override_pattern": PATTERN,
            "initializer_range": 0.02,
            "intermediate_size": MLP_SIZE,
            "layer_norm_epsilon": EPS,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_dt_min": 1e-6,
            "mamba_head_dim": SSM_HEAD_DIM,
            "mamba_hidden_act": "silu",
            "mamba_n_groups": GROUPS,
            "mamba_num_heads": SSM_HEADS,
            "mamba_proj_bias": False,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "mtp_hybrid_override_pattern": MTP_PATTERN,
            "n_groups": GROUPS,
            "num_attention_heads": HEADS,
            "num_hidden_layers": len(PATTERN),
            "num_key_value_heads": KV_HEADS,
            "num_nextn_predict_layers": 1,
            "residual_in_fp32": False,
            "ssm_state_size": STATE,
            "tie_word_embeddings": False,
            "use_bias": False,
            "use_cache": True,
            "use_conv_bias": True,
            "use_mamba_kernels": False,
            "vocab_size": self.lm_head.out_features,
        }
