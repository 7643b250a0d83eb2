"""What differs between SGLang's versions while it serves: the tracking of prefills, what a request holds."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..names import GDN
from ..tracking import FLAT_GRID, PER_SEQUENCE, PER_SEQUENCE_FLOOR, HostTracking

# -------------------------------------------------------------------------------------------------- prefill tracking


@functools.cache
def boundary_states(family: str) -> str:
    """How `h` is laid out for ``family`` in the installed version."""
    if family == GDN:
        return PER_SEQUENCE
    metadata = importlib.import_module("sglang.srt.layers.attention.mamba.mamba2_metadata")
    return FLAT_GRID if "track_ssm_recompute_dst" in _field_names(metadata.ForwardMetadata) else PER_SEQUENCE_FLOOR


def snapshot_size() -> int:
    """Tokens between two places the prefix cache snapshots at: the model's chunk size or the page size."""
    context = importlib.import_module("sglang.srt.runtime_context")
    if hasattr(context, "mamba_cache_chunk_size"):
        return int(context.mamba_cache_chunk_size())
    return int(context.get_server_args().mamba_cache_chunk_size)


def track_chunk_size(backend: Any) -> int:
    """Tokens between two boundary states of ``backend``'s prefill kernels, as SGLang takes it.

    Up to 0.5.18 it takes the snapshot size, which is not the kernels' where a page is larger than a chunk.
    """
    if hasattr(type(backend), "mamba_chunk_size"):
        return int(backend.mamba_chunk_size)
    return snapshot_size()


_HOST_COPY = "_mamba_mtp_host"


@functools.cache
def schedule_batch_has_host_tracking() -> bool:
    """Whether SGLang itself carries the host copies from the scheduler to the forward (up to 0.5.20 it does not)."""
    module = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    return "mamba_prefill_track_mask_cpu" in _field_names(module.ForwardBatch)


def attach_host_tracking(batch: Any, tracking: HostTracking) -> None:
    """Let the host copy travel on the very tensor it mirrors.

    Whoever replaces or clears ``batch.mamba_track_mask`` (merge, filter, decode) thereby drops the copy, so it cannot
    go stale.
    """
    if batch.mamba_track_mask is not None and batch.mamba_track_mask.shape[0] == len(tracking.mask):
        setattr(batch.mamba_track_mask, _HOST_COPY, tracking)


def host_tracking(forward_batch: Any) -> HostTracking | None:
    """The host copy of a `ForwardBatch`'s tracking, or None if there is none."""
    mask = getattr(forward_batch, "mamba_prefill_track_mask_cpu", None)
    seqlens = getattr(forward_batch, "mamba_track_seqlens_cpu", None)
    if mask is not None and seqlens is not None and len(mask) == len(seqlens):
        return HostTracking(mask=mask, seqlens=seqlens)
    return getattr(forward_batch.mamba_track_mask, _HOST_COPY, None)


#: Attributes of a `ForwardBatch` that make SGLang compute tracking indices itself.
TRACKING_ATTRIBUTES = ("mamba_track_mask", "mamba_prefill_track_mask_cpu")


def _field_names(record: type) -> set[str]:
    return set(inspect.get_annotations(record)) | set(getattr(record, "__dataclass_fields__", ()))


# ---------------------------------------------------------------------------------------------------------- requests


def request_slot(req: Any) -> Any:
    """The state slot of a request (0-dim tensor), or None."""
    return req.mamba_pool_idx if hasattr(req, "mamba_pool_idx") else req.kv.mamba_pool_idx


def request_slots(req: Any) -> Any:
    """All state slots of a request (int64 [n], negative where a snapshot's has yet to be taken), or None."""
    of_both = request_slot(req), tracking_of(req).mamba_ping_pong_track_buffer
    found = [slots.reshape(-1) for slots in of_both if slots is not None]
    return torch.cat(found) if found else None


#: What a request has of its own slot, and of the slots for its snapshots; some versions lack some.
_OF_ITS_SLOT = ("mamba_pool_idx", "mamba_last_track_seqlen", "mamba_prev_track_seqlen")
_OF_ITS_SNAPSHOTS = (
    "mamba_ping_pong_track_buffer",
    "mamba_ping_pong_empty",
    "mamba_next_track_idx",
    "mamba_last_track_idx",
)


def _let_go(req: Any, names: Sequence[str]) -> None:
    for holder in (req, getattr(req, "kv", None)):
        for name in names:
            if hasattr(holder, name):
                setattr(holder, name, None)


def let_go_of_slot(req: Any) -> None:
    """``req`` holds no state slot of its own any more."""
    _let_go(req, _OF_ITS_SLOT)
    tracking = tracking_of(req)
    if hasattr(tracking, "mamba_needs_clear"):
        tracking.mamba_needs_clear = False


def let_go_of_snapshot(req: Any) -> None:
    """``req`` holds no slot for a snapshot any more: its next prefill gets one."""
    _let_go(req, _OF_ITS_SNAPSHOTS)


def request_row(req: Any) -> int | None:
    """The request row of a request, or None."""
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def tracking_of(req: Any) -> Any:
    """Where a request keeps its snapshot slots (``mamba_ping_pong_track_buffer``) and what they hold."""
    return req if hasattr(req, "mamba_ping_pong_track_buffer") else req.kv


def lengths_of(req: Any) -> Any:
    """Where a request keeps how many of its tokens it has committed (``kv_committed_len``): in KV cache and state."""
    return req if hasattr(req, "kv_committed_len") else req.kv


def key_length(req: Any) -> int:
    """Of how many of its committed tokens the radix cache is told when a request ends."""
    owned = getattr(req, "owned_kv_len", None)  # up to 0.5.20 under another name
    return int(owned() if owned is not None else req.effective_kv_committed_len())


def answered_length(req: Any) -> int:
    """How many tokens the prompt and the answer of ``req``, which has ended, have together. Up to 0.5.21 `key_length`
    counts those that were accepted past the answer's stop too, which nobody is told and no next turn begins with."""
    return len(req.origin_input_ids) + len(req.output_ids_through_stop)


def insertion_of_a_prefix(insert_params: Any, length: int, state: Any) -> Any:
    """To insert, after the insertion of ``insert_params``, ``state`` [1] (a slot) at its key's first ``length`` tokens,
    whose KV cache the radix cache has by then."""
    counted = {"inserted_len": length} if hasattr(insert_params, "inserted_len") else {}  # from 0.5.22 on
    return dataclasses.replace(
        insert_params,
        key=insert_params.key[:length],
        value=insert_params.value[:length],
        mamba_value=state,
        prev_prefix_len=length,  # or the tree would free them as duplicates of its own
        **counted,
    )


def finds_older_snapshots(component: Any) -> bool:
    """Whether the radix cache itself looks for a finished request's newest snapshot in its key (from 0.5.22 on)."""
    return hasattr(component, "_select_finished_checkpoint")


def may_cross_track_boundary(req: Any, interval: int, max_nodes: int) -> bool:
    """Whether a verify in flight may take ``req`` past a multiple of ``interval``, as SGLang counts it."""
    module = importlib.import_module("sglang.srt.managers.schedule_batch")
    return bool(module.mamba_lazy_spec_in_window(req, interval, max_nodes))


def tails_of(batch: Any) -> list[Any]:
    """The requests that a mixed batch decodes, one token each, behind its prefills, where drafts are verified."""
    return list(batch.decoding_reqs or ()) if not batch.spec_algorithm.is_none() else []


def may_retract(scheduler: Any, batch: Any) -> bool:
    """Whether ``scheduler`` is about to take requests of its running ``batch`` back."""
    module = importlib.import_module("sglang.srt.managers.scheduler")
    forced = module.TEST_RETRACT and scheduler.forward_ct % module.TEST_RETRACT_INTERVAL == 0
    running = [row for row, req in enumerate(batch.reqs) if not (req.finished() or req.is_retracted)]
    return bool(running) and (forced or not batch.check_decode_mem(running))


@functools.cache
def blocks_take_no_snapshots() -> bool:
    """Whether a verify of DFLASH has no snapshots taken (up to 0.5.19): it is not told the lengths after it."""
    worker = importlib.import_module("sglang.srt.speculative.dflash_worker_v2").DFlashWorkerV2
    commit = inspect.unwrap(worker._update_target_mamba_state_after_verify)
    return "seq_lens_post_verify" not in inspect.signature(commit).parameters


def prepare_tracking(batch: Any) -> None:
    """Which slots the verify that is being prepared takes its snapshots into, as SGLang has it for other drafts."""
    importlib.import_module("sglang.srt.speculative.spec_utils").prepare_mamba_track_for_verify(batch)


def snapshot_slots(requests: Any) -> int:
    """State slots that a request of SGLang's ``HybridReqToTokenPool`` takes beside its own, to hand states to the radix
    cache: those that it tracks snapshots in, or one for a copy."""
    return int(requests.mamba_ping_pong_track_buffer_size) if requests.enable_mamba_extra_buffer else 1


def slot_siblings(mamba_pool: Any) -> Sequence[Any]:
    """What else SGLang keeps by state slot and copies with it (``copy_slots(src, dst)``); nothing in 0.5.17."""
    return getattr(mamba_pool, "_slot_siblings", ())
