"""Host copies of what a prefill tracks; snapshots of DFLASH's verifies; what waits for the step before."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_mamba_mtp.compat import batches, version
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


@pytest.mark.parametrize("size", [2, 3])
def test_a_padded_batch_keeps_its_host_copies(sglang, monkeypatch, size):
    """`_pad_inputs_to_size` replaces the mask; padded rows track nothing. SGLang's own copies are SGLang's to pad."""

    def pad(batch, model_runner, num_tokens, bs):
        batch.mamba_track_mask = torch.cat([batch.mamba_track_mask, torch.zeros(bs - 2, dtype=torch.bool)])

    for by_sglang in (False, True):
        monkeypatch.setattr(batches, "schedule_batch_has_host_tracking", lambda said=by_sglang: said)
        batch = SimpleNamespace(mamba_track_mask=torch.tensor([True, False]))
        batches.attach_host_tracking(batch, HostTracking([True, False], [33, -1]))
        step.keep_track_entries(pad, batch, None, 8, size)
        kept = HostTracking([True, False, False][:size], [33, -1, -1][:size])
        assert batches.host_tracking(batch) == (None if by_sglang else kept)
    batch = SimpleNamespace(mamba_track_mask=None)
    step.keep_track_entries(lambda *_: None, batch, None, 8, size)
    assert batch.mamba_track_mask is None


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


@pytest.mark.parametrize("without", [False, True])
def test_a_block_tracks_as_other_drafts_do(monkeypatch, without):
    """Where SGLang does not say which slots a verify of DFLASH takes its snapshots into; an idle rank has none."""
    prepared = []
    monkeypatch.setattr(batches, "blocks_take_no_snapshots", lambda: without)
    monkeypatch.setattr(batches, "prepare_tracking", prepared.append)
    running, idle = (
        SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda idle=idle: idle)) for idle in (False, True)
    )
    step.track_in_a_block(None, running, "worker")
    step.track_in_a_block(None, idle, "worker", defer_metadata_init=True)
    assert prepared == [running] * without


@pytest.mark.parametrize("without", [False, True])
def test_a_block_is_committed_with_the_lengths_after_it(monkeypatch, without):
    """Earlier versions look for them where the lengths before it still are."""
    monkeypatch.setattr(batches, "blocks_take_no_snapshots", lambda: without)
    batch = SimpleNamespace(seq_lens=torch.tensor([14, 30]))
    told = {"seq_lens_pre_verify": torch.tensor([14, 30]), "commit_lens": torch.tensor([5, 1])}
    if not without:
        told["seq_lens_post_verify"] = torch.tensor([19, 31])
    seen = []

    def update(worker, *, batch, **lengths):
        seen.append((worker, batch.seq_lens.tolist(), lengths))
        if len(seen) > 1:
            raise RuntimeError("at the first boundary")

    step.commit_block(update, "worker", batch=batch, **told)
    with pytest.raises(RuntimeError):
        step.commit_block(update, "worker", batch=batch, **told)
    assert [entry[:2] for entry in seen] == [("worker", [19, 31] if without else [14, 30])] * 2
    assert all(
        lengths.keys() == told.keys() and all(lengths[name] is told[name] for name in told) for *_, lengths in seen
    )
    assert batch.seq_lens.tolist() == [14, 30]


def test_which_versions_take_no_snapshots_of_a_block(sglang):
    """By what the commit is told, under our hook too."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    told = inspect.signature(inspect.unwrap(DFlashWorkerV2._update_target_mamba_state_after_verify)).parameters
    assert batches.blocks_take_no_snapshots() is ("seq_lens_post_verify" not in told)
    assert batches.blocks_take_no_snapshots() is (version.version_numbers() < (0, 5, 20))


@pytest.mark.parametrize(
    ("mixed", "drafts", "grammars", "pending", "waits"),
    [
        (True, True, [None, "grammar"], True, True),
        (True, True, [None, "grammar"], False, False),
        (True, True, [None, "grammar"], None, False),  # without overlap there is nothing to be late
        (True, True, [None], True, False),
        (True, False, ["grammar"], True, False),  # SGLang samples behind the last result itself
        (False, True, ["grammar"], True, False),  # a verify asks by itself; what was once a tail may still be named
    ],
)
def test_only_a_tail_with_a_grammar_waits(mixed, drafts, grammars, pending, waits):
    """For the result of the step before, and a prefill's grammar beside it does not."""
    advanced = []
    tails = [SimpleNamespace(grammar=grammar) for grammar in grammars]
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(grammar="of a prefill"), *tails],
        decoding_reqs=tails,
        forward_mode=SimpleNamespace(is_mixed=lambda: mixed),
        spec_algorithm=SimpleNamespace(is_none=lambda: not drafts),
    )
    scheduler = SimpleNamespace(_advance_pending_grammar=lambda: advanced.append(True))
    if pending is not None:
        scheduler.result_queue = ["result"] * pending
    step.advance_the_grammars_of_tails(scheduler, batch, pp_proxy_tensors=None)
    assert advanced == [True] * waits
