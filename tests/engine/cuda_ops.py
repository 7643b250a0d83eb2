"""What an engine of the tests needs on a GPU: float32 all the way, at head sizes no real model has.

States are compared to 1e-5, so everything beside the recurrence must be float32. SGLang's CUDA path is made for 16
bits: its norms, rotary embedding, activations and expert kernels have no float32 version, its GDN prefill asserts 16
bits, and Triton multiplies float32 matrices in tf32 (1e-3) unless told otherwise. `install` puts SGLang's own PyTorch
versions in their place, and the plugin's PyTorch prefills (of its CPU engine). Left alone: the plugin's kernels,
SGLang's convolutions, plain decodes, verifies and scatters, its attention, its speculative kernels, CUDA graphs,
streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

PROCESS_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # compiling what SGLang decorates takes longer than the tests
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # what a test compares is small, and as many threads as cores wait for each other
    "NVIDIA_TF32_OVERRIDE": "0",
    "TRITON_F32_DEFAULT": "ieee",
    "SGLANG_MAMBA_SSM_DTYPE": "float32",
    # Ranks refuse to start where another test's engine has taken memory of one of their GPUs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
"""For every engine on a GPU, before torch is imported (children inherit it). An engine's own ``env`` wins, and
``--mamba-ssm-dtype`` too, which SGLang puts in the place of the last."""

COMPILING = {
    "env": {
        "TORCHDYNAMO_DISABLE": "0",
        "SGLANG_TORCH_COMPILE_MODE": "default",  # trying every kernel for every product takes longer than the test
    },
    "extra": {"enable_torch_compile": True, "torch_compile_max_bs": 1},
}
"""What of an `EngineSpec` makes SGLang compile the model's forward, for verifies of one request: each number more takes
as long again."""


def environment(dtype: str) -> dict[str, str]:
    """What else an engine of ``dtype`` needs; read when its pools are built."""
    return {"SGLANG_MAMBA_CONV_DTYPE": dtype}


SERVER_ARGS: dict[str, Any] = {
    # Given for both phases instead of for both at once: SGLang refuses Triton attention for Nemotron-H, whose first
    # layer is none (`_kv_of_any_layer` below), and has no other attention for float32 or heads of 16.
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "triton",
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "disable_shared_experts_fusion": True,
}
"""ServerArgs of every engine on a GPU."""


def install() -> None:
    """Replace what has no float32 version in this process; call after plugins are loaded, before a model is built."""
    from sglang.srt.layers import activation, layernorm
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.models import qwen3_next

    from sglang_mamba_mtp.cpu import gdn_ops, mamba2_ops

    for op in (
        layernorm.RMSNorm,
        layernorm.GemmaRMSNorm,
        activation.SiluAndMul,
        activation.ReLU2,
        RotaryEmbedding,
        TopK,
    ):
        op.forward_cuda = op.forward_native
    UnquantizedFusedMoEMethod.forward_cuda = own_experts(fused_moe_forward_native)
    qwen3_next.fused_qkvzba_split_reshape_cat = split_qkvzba
    gdn_triton.chunk_gated_delta_rule = _on_gpu(_in_place(gdn_ops.chunk_gated_delta_rule_cpu))
    # 0.5.17's own prefill also numbers its states so that snapshots of all but a batch's first sequence are wrong.
    mamba.mamba_chunk_scan_combined = _on_gpu(mamba2_ops.mamba_chunk_scan_combined)
    HybridLinearKVPool.get_value_buffer = _kv_of_any_layer(HybridLinearKVPool.get_value_buffer)
    if find_spec("cutlass") is None and find_spec("sglang.srt.layers.dual_gemm"):
        # 0.5.23's Llama imports CuTe-DSL to find that a Hopper GPU has no such kernel.
        from sglang.srt.layers.dual_gemm import DualGemm

        DualGemm._select_mode = lambda self, gate_up_proj, hidden_size: None


def own_experts(moe: Callable[..., Any]) -> Callable[..., Any]:
    """``moe`` as a method of SGLang's, which names its arguments; experts of other ranks (id -1) weigh nothing."""

    def run(self: Any, layer: Any, dispatch_output: Any) -> Any:
        chosen = dispatch_output.topk_output
        weights = chosen.topk_weights.masked_fill(chosen.topk_ids < 0, 0.0)
        own = chosen._replace(topk_weights=weights, topk_ids=chosen.topk_ids.clamp(min=0))
        return moe(layer, dispatch_output._replace(topk_output=own))

    return run


def _on_gpu(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` with the tensors it makes on the GPU. It reads lengths from the device: prefills are not captured."""

    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda"):
            return op(*args, **kwargs)

    return run


def _in_place(prefill: Callable[..., Any]) -> Callable[..., Any]:
    """``prefill``, called as 0.5.23 calls its own kernel: it may ask for states to be left as they are."""

    @functools.wraps(prefill)
    def run(*args: Any, inplace_update: bool = True, **kwargs: Any) -> Any:
        assert inplace_update, "only multi-item scoring leaves the states as they are"
        return prefill(*args, **kwargs)

    return run


def _kv_of_any_layer(get_value_buffer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Triton attention asks layer 0 for the size of a value head, be it an attention layer or not."""

    @functools.wraps(get_value_buffer)
    def of_any_layer(self: Any, layer_id: int, *args: Any) -> torch.Tensor:
        if layer_id == 0 and layer_id not in self.full_attention_layer_id_mapping:
            return self.full_kv_pool.get_value_buffer(0)
        return get_value_buffer(self, layer_id, *args)

    return of_any_layer


def split_qkvzba(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, heads_qk: int, heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3-Next's projections, one group of heads after the other, taken apart; SGLang's kernel wants powers of two.

    ``mixed_qkvz`` [T, heads_qk (2 head_qk + 2 g head_v)], ``mixed_ba`` [T, heads_qk 2 g] with g = heads_v / heads_qk.
    Returns qkv [T, 2 heads_qk head_qk + heads_v head_v], z [T, heads_v, head_v], b and a [T, heads_v].
    """
    tokens, group = mixed_qkvz.shape[0], heads_v // heads_qk
    q, k, v, z = mixed_qkvz.view(tokens, heads_qk, -1).split([head_qk, head_qk, group * head_v, group * head_v], dim=-1)
    b, a = mixed_ba.view(tokens, heads_qk, 2 * group).split(group, dim=-1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=-1)
    return qkv, z.reshape(tokens, heads_v, head_v), b.reshape(tokens, heads_v), a.reshape(tokens, heads_v)
