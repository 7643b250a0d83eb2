"""What the hooks do on a decode server, into whose state slots a prefill server writes.

The prefill server verifies nothing and is SGLang's own. What it sends is the whole state after the prompt, as SGLang's
kernels read it. Nobody clears a slot here before a request gets it, and nobody asks the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import batches
from ..state.pools import MtpMambaPool


def _pool(requests: Any) -> MtpMambaPool | None:
    """The mamba pool of a request pool, if it is one of ours that states arrive in."""
    pool = getattr(requests, "mamba_pool", None)
    return pool if isinstance(pool, MtpMambaPool) and pool.arrivals is not None else None


def slots_are_freed(requests: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `HybridReqToTokenPool.free_mamba_cache`."""
    pool, slots = _pool(requests), batches.request_slots(req)
    if pool is not None and slots is not None:
        pool.given_up(slots)


def slot_is_promised(result: Any, queue: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `DecodePreallocQueue._pre_alloc`: next SGLang tells the prefill server where to write."""
    pool = _pool(queue.req_to_token_pool)
    if pool is not None:
        pool.awaits(batches.request_slot(req))


def state_has_arrived(result: None, queue: Any, decode_req: Any) -> None:
    """AFTER `DecodeTransferQueue._commit_transfer_to_req`: the request's first verify is yet to be launched."""
    pool = _pool(queue.scheduler.req_to_token_pool)
    slot = batches.request_slot(decode_req.req)
    if pool is not None and slot is not None:
        pool.arrive_from_host(slot.reshape(1))


def count_before_a_retraction(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND `Scheduler.update_running_batch`: a decode server keeps the state of a request that it takes back, and the
    tokens that it knows of. With overlap scheduling a verify is at work then whose tokens are in the state and never
    counted: SGLang drops them. So they are counted first."""
    waiting = getattr(scheduler, "result_queue", None)
    if waiting and scheduler.disaggregation_mode.value == "decode" and batches.may_retract(scheduler, batch):
        while waiting:
            scheduler.process_batch_result(*waiting.popleft())
        scheduler.last_batch = None
    return original(scheduler, batch)
