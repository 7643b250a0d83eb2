"""What the hooks do in every step: host copies of what a prefill tracks, commits, what waits for the step before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..backends.target_verify import TargetVerify
from ..compat import batches
from ..tracking import HostTracking


def collect_track_entries(original: Callable[[Any], None], batch: Any) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`: keep on the host what SGLang only uploads.

    Up to 0.5.20 the scheduler turns its lists into device tensors and drops them, and the forward then copies them
    back, one device synchronisation each.
    """
    entries: list[Any] = []
    batch._mamba_mtp_entries = entries
    try:
        original(batch)
    finally:
        del batch._mamba_mtp_entries
    if entries and not batches.schedule_batch_has_host_tracking():
        tracking = HostTracking(
            mask=[bool(entry.track_mask) for entry in entries], seqlens=[int(entry.track_seqlen) for entry in entries]
        )
        batches.attach_host_tracking(batch, tracking)


def collect_track_entry(entry: Any, batch: Any, req: Any) -> None:
    """AFTER `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: one request's entry."""
    entries = getattr(batch, "_mamba_mtp_entries", None)
    if entries is not None:
        entries.append(entry)


def keep_track_entries(
    original: Callable[..., Any], forward_batch: Any, model_runner: Any, num_tokens: int, bs: int
) -> Any:
    """AROUND `ForwardBatch._pad_inputs_to_size`: what is padded keeps its host copies. Padded rows track nothing.

    Data-parallel attention pads the batches of all ranks to one size. From 0.5.21 on SGLang has host copies of its own
    and pads them.
    """
    held = forward_batch.mamba_track_mask is not None and not batches.schedule_batch_has_host_tracking()
    tracking = batches.host_tracking(forward_batch) if held else None
    result = original(forward_batch, model_runner, num_tokens, bs)
    if tracking is not None:
        more = forward_batch.mamba_track_mask.shape[0] - len(tracking.mask)
        padded = HostTracking(mask=[*tracking.mask, *[False] * more], seqlens=[*tracking.seqlens, *[-1] * more])
        batches.attach_host_tracking(forward_batch, padded)
    return result


def commit(
    original: Callable[..., Any],
    hybrid_backend: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND `update_mamba_state_after_mtp_verify`: our backends record what their verify accepted."""
    accepted = (last_correct_step_indices, mamba_track_indices, mamba_steps_to_track)
    backend = hybrid_backend.linear_attn_backend
    if isinstance(backend, TargetVerify):
        return backend.commit_verify(*accepted)
    return original(hybrid_backend, *accepted, *args, **kwargs)


def track_in_a_block(verify: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `DFlashVerifyInput.prepare_for_verify`: which slots a verify of DFLASH takes its snapshots into, as with
    every other draft. From 0.5.18 on SGLang says so itself; up to then they are those of the last prefill, or none.
    """
    if not batch.forward_mode.is_idle() and batches.blocks_take_no_snapshots():
        batches.prepare_tracking(batch)


def commit_block(
    original: Callable[..., None],
    worker: Any,
    *,
    batch: Any,
    seq_lens_pre_verify: torch.Tensor,
    commit_lens: torch.Tensor,
    **kwargs: Any,
) -> None:
    """AROUND `DFlashWorkerV2._update_target_mamba_state_after_verify`: a snapshot is taken where a verify crosses an
    interval.

    Up to 0.5.19 SGLang takes the batch's lengths for those after the verify, which they become only later: it takes no
    snapshot, and caches what the slot held as the state at the interval.
    """
    lengths = {"batch": batch, "seq_lens_pre_verify": seq_lens_pre_verify, "commit_lens": commit_lens, **kwargs}
    if not batches.blocks_take_no_snapshots():
        original(worker, **lengths)
        return
    before, batch.seq_lens = batch.seq_lens, seq_lens_pre_verify + commit_lens
    try:
        original(worker, **lengths)
    finally:
        batch.seq_lens = before


class _Behind(contextlib.AbstractContextManager):
    """A stream, entered behind everything the current stream has been given so far."""

    def __init__(self, stream: Any, entered: contextlib.AbstractContextManager) -> None:
        self._stream, self._entered = stream, entered

    def __enter__(self) -> Any:
        self._stream.wait_stream(torch.get_device_module(self._stream.device).current_stream())
        return self._entered.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.__exit__(*exception)


def plan_behind_the_forward(original: Callable[[str], Any], device: str) -> Any:
    """AROUND `get_plan_stream`: preparing a step waits for the forward before it, whose buffers it overwrites.

    From 0.5.20 on SGLang waits itself before a verify. Up to 0.5.19 it does not: the next step's slots and rows replace
    this step's while its verify and its commit may still read them, and sequence lengths are read before they are
    there.
    """
    stream, entered = original(device)
    return (stream, entered) if stream is None else (stream, _Behind(stream, entered))


def advance_the_grammars_of_tails(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `Scheduler.run_batch`: grammars of what a mixed batch decodes are told of all tokens before it is sampled.

    With overlap scheduling a batch is run before the result of the last one is looked at. A verify advances grammars
    over that result itself, before it makes its mask; a mixed batch has no verify, and SGLang would mask a tail's token
    by where its grammar was before the last step, and abort the request if its grammar then refuses the token.
    """
    pending = getattr(scheduler, "result_queue", None)  # up to 0.5.21 only with overlap scheduling
    if pending and batch.forward_mode.is_mixed() and any(req.grammar is not None for req in batches.tails_of(batch)):
        scheduler._advance_pending_grammar()
