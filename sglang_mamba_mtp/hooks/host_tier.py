"""What the hooks do about SGLang's HiCache, in which the radix cache keeps states in the host's memory too.

Its controller copies the bytes of state slots, beside the forwards and on streams of its own: to the host when a state
is cached (write-through) or evicted (write-back), and back when a prompt hits a state that only the host has. Nobody
asks the pool. So it is told here, before every copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from ..compat import batches
from ..state.pools import MtpMambaPool
from ..state.rewind import RewindRequests


class _ByNumber(dict[int, Any]):
    """Layers by their number, whose union with others counts those without anything that lie between."""

    def __ror__(self, others: dict[int, Any]) -> dict[int, Any]:  # type: ignore[override]
        layers = {**others, **self}
        return {layer: layers.get(layer) for layer in range(max(layers) + 1)}


def copy_every_layer(original: Callable[..., Any], **arguments: Any) -> Any:
    """AROUND `build_hybrid_mamba_stack`: up to 0.5.20 SGLang takes how many layers have keys or states for the number
    of the last one, where layers of other kinds may lie between (Nemotron-H's MLPs). It leaves the last ones on the
    host then, and ends with an error at the first hit there. Later it asks for the number."""
    if "mamba_layer_mapping" in arguments:
        arguments["mamba_layer_mapping"] = _ByNumber(arguments["mamba_layer_mapping"])
    return original(**arguments)


def _pool(controller: Any) -> MtpMambaPool | None:
    """The mamba pool whose states ``controller`` copies, if it is one of ours."""
    entry = controller.mem_pool_host.entry_map.get(PoolName.MAMBA)
    return entry.device_pool if entry is not None and isinstance(entry.device_pool, MtpMambaPool) else None


def _state_slots(operations: Iterable[Any]) -> torch.Tensor | None:
    """State slots [n] on the device's side of copies that wait to be issued."""
    transfers = [transfer for operation in operations for transfer in operation.pool_transfers or ()]
    slots = [transfer.device_indices for transfer in transfers if transfer.name == PoolName.MAMBA]
    return torch.cat(slots) if slots else None


def states_leave(controller: Any) -> None:
    """BEFORE `HybridCacheController.start_writing`."""
    pool, slots = _pool(controller), _state_slots(controller.write_queue)
    if pool is not None and slots is not None:
        pool.leave_for_host(slots)


def states_arrive(original: Callable[[Any], int], controller: Any) -> int:
    """AROUND `HybridCacheController.start_loading`."""
    pool, slots = _pool(controller), _state_slots(controller.load_queue)
    if pool is None or slots is None:
        return original(controller)
    pool.arrive_from_host(slots)
    producer = original(controller)
    pool.arriving_until(controller.ack_load_queue[-1].finish_event)
    return producer


def back_up(original: Callable[..., int], cache: Any, action: Any, write_back: bool = False) -> int:
    """AROUND `UnifiedRadixCache._execute_and_commit_kv_backup`: what is being copied to the host cannot be evicted
    until it is there. SGLang sends all that it caches, and where copies are slower than requests come and go, the next
    request finds no slot and its scheduler ends with an assertion. Here nothing more is sent while slots are short,
    until somebody hits it again. (A write-back waits for its copy.)"""
    if not write_back and cache.supports_mamba():
        requests = cache.req_to_token_pool
        there = requests.mamba_allocator.available_size() + cache.mamba_evictable_size()
        spare = there - _slots_to_leave(requests)
        if spare <= 0:
            return 0
        # a chain of nodes, parents first, each with a state of its own: as many as can be spared
        action = type(action)(action.node_ids[:spare])
    return original(cache, action, write_back)


def _slots_to_leave(requests: Any) -> int:
    """State slots that are to be had, now or by evicting, beside those of states that are sent to the host: for every
    request that may begin its own and what its snapshots take; for every other one in the pool the copy that the radix
    cache takes of its prefill; and one more for a request that begins in place of one that is ending."""
    beginning = requests.available_size()
    return beginning * (1 + batches.snapshot_slots(requests)) + (requests.size - beginning) + 1


def load_back(
    original: Callable[..., bool], cache: Any, node_id: Any, mem_quota: int | None = None, req: Any = None
) -> bool:
    """AROUND `UnifiedRadixCache.load_back`: where nothing is loaded, SGLang prefills ``req`` behind what it hit on the
    device, but has its state start from nothing, or from that of the longer prefix that it wanted to load. And where
    states are rewound, slots are few: none is filled for the radix cache that a request may need."""
    requests = cache.req_to_token_pool
    may_load = not isinstance(requests, RewindRequests) or requests.may_load(cache.mamba_evictable_size())
    if may_load and original(cache, node_id, mem_quota, req=req):
        return True
    if req is not None and cache.supports_mamba():
        _start_from_the_devices_hit(cache, req)
    return False


def _start_from_the_devices_hit(cache: Any, req: Any) -> None:
    """The state of ``req`` is to be a copy of the one that its prefix on the device ends with; none is to be zeros."""
    tracking = batches.tracking_of(req)
    tracking.mamba_cow_src_index = None
    tracking.mamba_needs_clear = batches.request_slot(req) is not None
    hit = SimpleNamespace(best_match_node=req.last_node)
    component = cache.components[ComponentType.MAMBA]
    component.finalize_match_result_in_cache(SimpleNamespace(cow_mamba=True, req=req), hit)
