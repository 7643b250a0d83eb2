"""What the radix cache is given: only slots that hold exactly the tokens of the key they are cached under.

A slot about to be donated is brought up to date first. The cases in which SGLang would cache a state that is ahead of
its key, most of them up to 0.5.21, are closed; where a later version closes one itself the same is simply said twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import batches
from ..state.pools import MtpMambaPool
from ..state.rewind import RewindRequests
from ..state.upload import upload


def forget_snapshot_past_the_key(
    component: Any, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
) -> None:
    """BEFORE `MambaComponent.prepare_for_caching_req`: with ``--strip-thinking-cache`` the key ends with the prompt.

    A snapshot taken later is no state of it. From 0.5.22 on SGLang looks for an older one; else the request has none.
    """
    tracking = batches.tracking_of(req)
    last = tracking.mamba_last_track_seqlen
    if last is not None and last > token_ids_len and not batches.finds_older_snapshots(component):
        tracking.mamba_last_track_seqlen = None


def before_donation(component: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `MambaComponent.prepare_for_caching_req`: the request's own slot is about to be read, or given away.

    With an extra buffer the radix cache takes a tracked snapshot instead, which has nothing pending.
    """
    cache = component.cache
    slot = batches.request_slot(req)
    if cache.enable_mamba_extra_buffer or slot is None:
        return
    pool = cache.req_to_token_pool.mamba_pool
    if isinstance(pool, MtpMambaPool):  # not a model, or a server without speculation, left to SGLang
        pool.settle(slot.reshape(1))


def drop_state_past_a_grammar(
    original: Callable[..., list[int]], processor: Any, req: Any, tokens: int | list[int]
) -> list[int]:
    """AROUND `_accept_grammar_tokens`: where a grammar ends inside an accepted run, SGLang drops the tokens past its
    end from the request, but they are in its state, and maybe in its snapshot: they may have crossed the boundary that
    was tracked, and up to 0.5.21 they count when SGLang asks whether the kept ones did. So the step is not cached,
    unless the state can be brought back to what is kept."""
    retained = original(processor, req, tokens)
    rewinds = isinstance(processor.tree_cache.req_to_token_pool, RewindRequests)
    if not isinstance(tokens, int) and len(retained) < len(tokens) and not rewinds:
        req.skip_radix_cache_insert = processor.tree_cache.supports_mamba() or req.skip_radix_cache_insert
    return retained


def track_only_into_own_snapshots(result: None, batch: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `set_mamba_track_indices_from_reqs`: a request that finished after its next verify was planned is in that
    verify all the same, and the slots it tracked into are the radix cache's or another request's by now."""
    indices = batch.mamba_track_indices
    if indices is None:
        return
    freed = [row for row, req in enumerate(batch.reqs) if batches.tracking_of(req).mamba_next_track_idx is None]
    if freed:
        # A list as an index would wait for the draft, which is at work on this stream.
        indices.index_fill_(0, upload(freed, torch.int64, indices.device), -1)


def forget_overwritten_snapshots(result: None, batch: Any, mamba_track_interval: int, max_draft_tokens: int) -> None:
    """AFTER `ScheduleBatch.mamba_lazy_spec_prepare`: a request for which no second slot was free tracks in place.

    The verify being prepared may then overwrite the snapshot its prefill took, whose result is processed only later and
    would cache it under the shorter key. So the snapshot counts as not taken.
    """
    for req, position in zip(batch.reqs, batch.mamba_lazy_spec_track_positions_cpu, strict=True):
        tracking = batches.tracking_of(req)
        in_place = position == tracking.mamba_next_track_idx
        if in_place and batches.may_cross_track_boundary(req, mamba_track_interval, max_draft_tokens):
            tracking.mamba_last_track_seqlen = None


def forget_snapshots_that_mixing_drops(result: None, batch: Any, running_batch: Any) -> None:
    """AFTER `ScheduleBatch.mix_with_running`: up to 0.5.22 a mixed batch tracks nothing, but its prefills have been
    told that they do, and the radix cache would take what their snapshot slots held before.

    Of the requests that decode in it snapshots of earlier steps stay as they are.
    """
    if batch.mamba_track_mask is not None:
        return
    for req in batch.reqs[: len(batch.reqs) - running_batch.batch_size()]:
        batches.tracking_of(req).mamba_last_track_seqlen = None


def cache_no_state_past_its_key(req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `release_kv_cache`: without an extra buffer the radix cache is given the request's own state, which cannot
    be cut back where the key is shorter than what the request has committed.

    So it is where a run was accepted past a stop in 0.5.22 (0.5.23 caches nothing then either; earlier versions cache
    the tokens past the stop too), and everywhere with ``--strip-thinking-cache``.
    """
    if not tree_cache.supports_mamba() or tree_cache.enable_mamba_extra_buffer or not req.finished():
        return
    if batches.key_length(req) < batches.lengths_of(req).kv_committed_len:
        req.skip_radix_cache_insert = True


def count_what_a_tail_ends_with(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """AROUND `process_batch_result_prefill`: the token a tail decoded is in its state, whether or not it ends there.

    SGLang counts it only if the request goes on, and would cache the state of one that ends under a key that is one
    token short. So it is counted before the request is released, and taken back where SGLang has counted it as well.
    """
    running = [req for req in batches.tails_of(batch) if not req.finished() and not req.is_retracted]
    for req in running:
        batches.lengths_of(req).kv_committed_len += 1
    original(processor, batch, result)
    for req in running:
        if not req.finished():
            batches.lengths_of(req).kv_committed_len -= 1
