"""What the radix cache is given: only slots that hold exactly the tokens of the key they are cached under.

A slot about to be donated is brought up to date first. Two cases in which SGLang 0.5.17 would cache a state that is
ahead of its key are closed as later versions close them; there the same is simply said twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import compat
from .config import current_mode


def before_donation(component: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `MambaComponent.prepare_for_caching_req`: the request's own slot is about to be read, or given away.

    With an extra buffer the radix cache takes a tracked snapshot instead, which has nothing pending.
    """
    cache = component.cache
    slot = compat.request_slot(req)
    if cache.enable_mamba_extra_buffer or slot is None:
        return
    mode, pool = current_mode(), cache.req_to_token_pool.mamba_pool
    if isinstance(pool, mode.pool_class(type(pool))):  # not a model, or a server without speculation, left to SGLang
        mode.before_donation(pool, slot.reshape(1))


def drop_state_past_a_grammar(
    original: Callable[..., list[int]], processor: Any, req: Any, tokens: int | list[int]
) -> list[int]:
    """AROUND `_accept_grammar_tokens`: where a grammar ends inside an accepted run, SGLang drops the tokens past its
    end from the request, but they are in its state: without a snapshot of its own that state cannot be cached."""
    retained = original(processor, req, tokens)
    shortened = not isinstance(tokens, int) and len(retained) < len(tokens)
    if shortened and compat.tracking_of(req).mamba_ping_pong_track_buffer is None:
        req.skip_radix_cache_insert = processor.tree_cache.supports_mamba() or req.skip_radix_cache_insert
    return retained


def forget_overwritten_snapshots(result: None, batch: Any, mamba_track_interval: int, max_draft_tokens: int) -> None:
    """AFTER `ScheduleBatch.mamba_lazy_spec_prepare`: a request for which no second slot was free tracks in place.

    The verify being prepared may then overwrite the snapshot its prefill took, whose result is processed only later and
    would cache it under the shorter key. So the snapshot counts as not taken.
    """
    for req, position in zip(batch.reqs, batch.mamba_lazy_spec_track_positions_cpu, strict=True):
        tracking = compat.tracking_of(req)
        in_place = position == tracking.mamba_next_track_idx
        if in_place and compat.may_cross_track_boundary(req, mamba_track_interval, max_draft_tokens):
            tracking.mamba_last_track_seqlen = None
