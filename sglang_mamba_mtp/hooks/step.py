"""What the hooks do in every step: host copies of what a prefill tracks, commits, the order of streams."""

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
