"""What the radix cache is given where states are rewound (`state.rewind`): a request's own slot at its key's length,
and the snapshots of prefills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import batches
from ..state.rewind import RewindRequests


def offer_to_radix_cache(
    original: Callable[..., Any],
    component: Any,
    req: Any,
    insert_params: Any,
    token_ids_len: int,
    is_finished: bool,
) -> Any:
    """AROUND `MambaComponent.prepare_for_caching_req`: which slot goes with the key, and how long the key may be."""
    requests = component.cache.req_to_token_pool
    if not isinstance(requests, RewindRequests):
        return original(component, req, insert_params, token_ids_len, is_finished)
    if not is_finished:
        slot, length = requests.give_snapshot(req)
        insert_params.mamba_value = None if slot is None else _snapshot_as_cached(component, requests, slot)
        return length
    length = requests.length_within_reach(req, min(token_ids_len, batches.answered_length(req)))
    if length:
        insert_params.mamba_value = _as_cached(component, requests.offer(req, length))
    return length


def after_the_offer(
    original: Callable[..., Any],
    component: Any,
    req: Any,
    is_finished: bool,
    insert_result: Any = None,
    insert_params: Any = None,
) -> Any:
    """AROUND `MambaComponent.cleanup_after_caching_req`: a request that has ended keeps no slot."""
    requests = component.cache.req_to_token_pool
    if not isinstance(requests, RewindRequests) or not is_finished:
        return original(component, req, is_finished, insert_result=insert_result, insert_params=insert_params)
    if insert_result is not None:
        _insert_snapshot(component, requests, req, insert_params)
    taken = insert_result is not None and not insert_result.mamba_exist
    if not _in_int8(component):
        return requests.release(req, given=len(insert_params.key) if taken else None)
    if not taken and insert_params is not None and insert_params.mamba_value is not None:
        component._free_mamba_value(insert_params.mamba_value)
    return requests.release(req, given=None)


def _in_int8(component: Any) -> bool:
    """Whether the radix cache keeps its states in a pool of their own, and none of the requests' slots."""
    return component.int8_ckpt_pool is not None


def _as_cached(component: Any, slot: torch.Tensor) -> torch.Tensor:
    """What the radix cache is given for the state in ``slot`` [1]: the slot, or where the int8 of it lies [1]."""
    place: torch.Tensor = component._commit_int8_checkpoint(slot) if _in_int8(component) else slot
    return place


def _snapshot_as_cached(component: Any, requests: RewindRequests, slot: torch.Tensor) -> torch.Tensor:
    """The same for a snapshot, whose slot nobody else holds."""
    place = _as_cached(component, slot)
    if _in_int8(component):
        requests.mamba_allocator.free(slot)
    return place


def can_be_cut_back(original: Callable[..., bool], processor: Any, req: Any, result: Any, i: int) -> bool:
    """AROUND `_mamba_can_cache_finished_req`: SGLang takes a request without snapshot slots for one of ``no_buffer``,
    whose state cannot be shortened with a key that ends inside an accepted run. Here it can."""
    if isinstance(processor.tree_cache.req_to_token_pool, RewindRequests):
        return True
    return original(processor, req, result, i)


def _insert_snapshot(component: Any, requests: RewindRequests, req: Any, insert_params: Any) -> None:
    """The snapshot of a request that ended with its prefill: what shares a prefix with it will hit there, not at its
    end."""
    slot, length = requests.give_snapshot(req)
    if slot is None:
        return
    if length >= len(insert_params.key):
        requests.mamba_allocator.free(slot)
        return
    value = _snapshot_as_cached(component, requests, slot)
    if component.cache.insert(batches.insertion_of_a_prefix(insert_params, length, value)).mamba_exist:
        component._free_mamba_value(value)


def track_nothing_in_a_verify(original: Callable[..., None], batch: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `set_mamba_track_indices_from_reqs`: where states are rewound a commit tracks nothing (`Window.commit`),
    so there is nothing to look up for a verify.

    SGLang would gather slots that are not there, send the numbers of all rows to the device (from 0.5.22 on), which
    waits for the draft at work there, and work out with every commit where each request crosses an interval.
    """
    if isinstance(batch.req_to_token_pool, RewindRequests):
        batch.mamba_track_indices = None
    else:
        original(batch, *args, **kwargs)


def track_where_there_is_a_slot(entry: Any, batch: Any, req: Any) -> Any:
    """AFTER `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: perhaps no slot was left for this prefill's
    snapshot."""
    requests = batch.req_to_token_pool
    if not isinstance(requests, RewindRequests):
        return None
    requests.note_prefill(req)
    if requests.snapshot_of(req) is not None:
        return None
    batches.tracking_of(req).mamba_last_track_seqlen = None
    return entry._replace(track_mask=False, track_seqlen=-1)
