"""What the hooks do about SGLang's sleep mode, in which an idle server gives memory back and takes it again."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from ..state.pools import MtpMambaPool


def fall_asleep(updater: Any, request: Any) -> None:
    """BEFORE `release_memory_occupation`: whatever is at work on the cache's memory ends first.

    SGLang is idle then, which says that all results are read, not that the GPU is done: rows of `req_to_token` are read
    as requests are released, and states are settled for the radix cache, on streams that nobody waits for. SGLang waits
    for them after the memory is gone (sglang#37932), torch_memory_saver not at all.
    """
    if _is_about_the_cache(request):
        torch.get_device_module(updater.tp_worker.model_runner.device).synchronize()


def wake(result: Any, updater: Any, request: Any) -> None:
    """AFTER `resume_memory_occupation`: what lies in the pool's memory is not what was there.

    SGLang has emptied the cache when it gave the memory back, so all slots are free.
    """
    pool = getattr(updater.tp_worker.model_runner.req_to_token_pool, "mamba_pool", None)
    if _is_about_the_cache(request) and isinstance(pool, MtpMambaPool):
        pool.renew()
        # The scheduler's stream writes here, and any stream of the model may read next.
        torch.get_device_module(pool.device).synchronize()


def _is_about_the_cache(request: Any) -> bool:
    """Whether the pools are among the kinds of memory that ``request.tags`` names; none named means all."""
    return not request.tags or GPU_MEMORY_TYPE_KV_CACHE in request.tags
