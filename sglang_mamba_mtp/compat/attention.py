"""What the full-attention layers need where more requests run at a time than SGLang counts on."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from .startup import attention_ranks, resolved

logger = logging.getLogger(__name__)

#: Bytes of FlashInfer's workspace, where the operator says it.
WORKSPACE = "SGLANG_FLASHINFER_WORKSPACE_SIZE"

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


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
    args = resolved(server_args)
    if WORKSPACE in os.environ or "flashinfer" not in {getattr(args, name) for name in _BACKENDS}:
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
