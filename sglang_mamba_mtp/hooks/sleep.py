"""What the hooks do about SGLang's sleep mode, in which an idle server gives memory back and takes it again."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from ..state.pools import MtpMambaPool


def wake(result: Any, updater: Any, request: Any) -> None:
    """AFTER `resume_memory_occupation`: what lies in the pool's memory is not what was there.

    SGLang has emptied the cache when it gave the memory back, so all slots are free. ``request.tags`` says which kinds
    of memory came back; none means all.
    """
    if request.tags and GPU_MEMORY_TYPE_KV_CACHE not in request.tags:
        return
    pool = getattr(updater.tp_worker.model_runner.req_to_token_pool, "mamba_pool", None)
    if isinstance(pool, MtpMambaPool):
        pool.renew()
        # The scheduler's stream writes here, and any stream of the model may read next.
        torch.get_device_module(pool.device).synchronize()
