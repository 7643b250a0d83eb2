"""Host copies of what a prefill tracks; preparing a step behind the last one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

from sglang_mamba_mtp.compat import batches
from sglang_mamba_mtp.hooks import step
from sglang_mamba_mtp.tracking import HostTracking


def test_the_scheduler_leaves_host_copies(sglang, monkeypatch):
    """`prepare_for_extend` through our hooks, with SGLang's own per-request decision stubbed."""
    monkeypatch.setattr(batches, "schedule_batch_has_host_tracking", lambda: False)
    batch = SimpleNamespace(mamba_track_mask=None)

    def prepare(batch):
        for mask, seqlen in ((True, 33), (False, -1)):
            step.collect_track_entry(SimpleNamespace(track_mask=mask, track_seqlen=seqlen), batch, None)
        batch.mamba_track_mask = torch.tensor([True, False])

    step.collect_track_entries(prepare, batch)
    assert batches.host_tracking(batch) == HostTracking([True, False], [33, -1])
    assert not hasattr(batch, "_mamba_mtp_entries")


def test_planning_waits_for_the_forward_every_time():
    """The plan stream is entered behind the current one, each step anew; without a plan stream nothing is wrapped."""
    events: list[str] = []

    class Entered(contextlib.AbstractContextManager):
        def __enter__(self):
            events.append("in")

        def __exit__(self, *exception):
            events.append("out")

    stream = SimpleNamespace(device="cpu", wait_stream=lambda other: events.append(f"wait {other}"))
    device = SimpleNamespace(current_stream=lambda: "forward")
    with mock.patch("torch.get_device_module", return_value=device):
        _, context = step.plan_behind_the_forward(lambda device: (stream, Entered()), "cpu")
        for _ in range(2):
            with context:
                pass
    assert events == ["wait forward", "in", "out"] * 2
    nothing = contextlib.nullcontext()
    assert step.plan_behind_the_forward(lambda device: (None, nothing), "cpu") == (None, nothing)
