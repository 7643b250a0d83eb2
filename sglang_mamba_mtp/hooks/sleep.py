"""What the hooks do about SGLang's sleep mode, in which an idle server gives memory back and takes it again."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from ..state.pools import MtpMambaPool


def fall_asleep(updater: Any, request: Any) -> None:
    """BEFORE `release_memory_occupation`: whatever is at work on the pool ends first.

    SGLang is idle then, which says that all results are read, not that the GPU is done: states are settled and rewound
    behind a request's last result, on streams that nobody waits for. SGLang waits for them after the memory is gone.
    """
    pool = _pool_of(updater, request)
    if pool is not None:
        torch.get_device_module(pool.device).synchronize()


def wake(result: Any, updater: Any, request: Any) -> None:
    """AFTER `resume_memory_occupation`: what lies in the pool's memory is not what was there.

    SGLang has emptied the cache when it gave the memory back, so all slots are free.
    """
    pool = _pool_of(updater, request)
    if pool is not None:
        pool.renew()
        # The scheduler's stream writes here, and any stream of the model may read next.
        torch.get_device_module(pool.device).synchronize()


def _pool_of(updater: Any, request: Any) -> MtpMambaPool | None:
    """The pool, if it is ours and among the kinds of memory that ``request.tags`` names; none named means all."""
    if request.tags and GPU_MEMORY_TYPE_KV_CACHE not in request.tags:
        return None
    pool = getattr(updater.tp_worker.model_runner.req_to_token_pool, "mamba_pool", None)
    return pool if isinstance(pool, MtpMambaPool) else None
