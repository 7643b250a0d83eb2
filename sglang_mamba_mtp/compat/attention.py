"""The full-attention layers of a hybrid model: room for more requests than SGLang counts on, plans that wait less."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
from typing import Any

import torch

from .startup import attention_ranks, resolved

logger = logging.getLogger(__name__)

#: Bytes of FlashInfer's workspace, where the operator says it.
WORKSPACE = "SGLANG_FLASHINFER_WORKSPACE_SIZE"

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def _plans_with_flashinfer(server_args: Any) -> bool:
    args = resolved(server_args)
    return "flashinfer" in {getattr(args, name) for name in _BACKENDS}


def verify_workspace(*, requests: int, nodes: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of its workspace that FlashInfer takes for the graph of a verify of ``requests`` drafts of ``nodes`` tokens
    that splits the KV cache: partial outputs and their sums, float32, in tiles of queries (attention/scheduler.cuh).

    ``heads``, ``kv_heads``: of a rank, ``head_dim`` up to 256.
    """
    tile = 128 if head_dim < 256 else 64
    tiles = -(-requests * nodes * (heads // kv_heads) // tile) + requests - 1
    return heads * tiles * tile * (head_dim + 1) * 4


def make_room_for_verifies(server_args: Any, model_config: Any, *, requests: int, nodes: int) -> None:
    """Give FlashInfer a workspace that the largest verify fits, unless the operator has sized it.

    SGLang's default holds some 130 drafts of 4 tokens of a model with 40 heads of 128; a server with more requests
    fails as it captures its graphs.
    """
    if WORKSPACE in os.environ or not _plans_with_flashinfer(server_args):
        return
    ranks = attention_ranks()
    needed = verify_workspace(
        requests=requests,
        nodes=nodes,
        heads=model_config.num_attention_heads // ranks,
        kv_heads=max(1, model_config.get_total_num_kv_heads() // ranks),
        head_dim=model_config.head_dim,
    )
    setting = importlib.import_module("sglang.srt.environ").envs.SGLANG_FLASHINFER_WORKSPACE_SIZE
    if needed > setting.get():
        setting.set(needed)
        logger.debug("mamba-mtp: FlashInfer's workspace is %.0f MiB, for %d requests", needed / 2**20, requests)


def plan_linear_layers_first(hybrid: Any) -> None:
    """Let a `HybridLinearAttnBackend` prepare a forward of its linear-attention layers before that of the others.

    FlashInfer's plan copies to the host, which waits for all that was queued before: the draft, ahead of a verify.
    What the host does between that and the verify's launch the GPU waits for; what it has queued before runs beside
    the draft. Neither preparation reads what the other one changes. (The linear layers' sets the request rows of a
    graph's padding to zero, which they are.)
    """
    hybrid.attn_backend_list = [hybrid.linear_attn_backend, hybrid.full_attn_backend]


def plan_without_a_walk(server_args: Any) -> None:
    """Let FlashInfer's plans take the longest row of a batch in one step.

    FlashInfer 0.6.15 asks Python's `max`, which goes through a tensor element by element: twice a verify, with two
    operations a request, between its wait for the device and the verify's launch. 0.7.2 asks the tensor.
    """
    if _plans_with_flashinfer(server_args):
        importlib.import_module("flashinfer.prefill").max = _max  # type: ignore[attr-defined]


def _max(*values: Any, **options: Any) -> Any:
    """Python's `max`, of one tensor [n] too: 0-dim."""
    if len(values) == 1 and isinstance(values[0], torch.Tensor) and not options:
        return values[0].max()
    return builtins.max(*values, **options)
