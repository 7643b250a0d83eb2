"""The plan of FlashInfer's GDN prefill, which numbers its states in its own way: SGLang's own, from host lists alone.

SGLang takes that prefill by itself for heads of 128 (0.5.23 on Hopper, both versions on Blackwell).
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp import tracking
from sglang_mamba_mtp.compat import batches
from sglang_mamba_mtp.tracking import HostTracking

from ..devices import on_device, watch
from .test_prefill import SIZE, SNAPSHOT, backends, make_batch, metadata, plain  # noqa: F401 - a fixture

PLAN = ("track_ssm_h_src", "state_checkpoint_cu_starts", "num_state_checkpoints", "state_checkpoint_every_n_tokens")
TRACKED = ("off a boundary", "on a boundary", "either", "none")


def snapshot_size() -> int:
    return SNAPSHOT[batches.schedule_batch_has_host_tracking()]


@pytest.fixture
def flashinfer(backends, monkeypatch):  # noqa: F811
    """SGLang's backend and ours where FlashInfer prefills."""
    from sglang.srt.layers.attention.linear.kernels import gdn_flashinfer

    size = snapshot_size()
    for name, value in {"get_server_args": SimpleNamespace(mamba_cache_chunk_size=size), SIZE: size}.items():
        if hasattr(gdn_flashinfer, name):
            monkeypatch.setattr(gdn_flashinfer, name, lambda value=value: value)
    pair = backends("gdn")
    for backend in pair:
        backend.kernel_dispatcher.extend_uses_state_checkpoints = True
    return pair


def rows(rng: random.Random, tracked: str, mixed: int):
    """Lengths, prefixes, mask and sequence lengths of a prefill as the scheduler makes them: a tracked row is
    snapshotted at a multiple of the snapshot size, and one token more says that its prefill goes on from there."""
    size = snapshot_size()
    lens = [rng.choice([rng.randint(1, 5 * size), size * rng.randint(1, 4)]) for _ in range(rng.randint(1, 6))]
    prefixes = [rng.choice([0, size * rng.randint(0, 3), rng.randint(0, 50)]) for _ in lens]
    mask, seqlens = [], []
    for length, prefix in zip(lens, prefixes, strict=True):
        mask.append(tracked != "none" and length >= size and rng.random() < 0.8)
        end = size * rng.randint(1, max(1, length // size))
        more = {"off a boundary": 1, "on a boundary": 0}.get(tracked, rng.randint(0, 1))
        seqlens.append(prefix + end + more if mask[-1] else -1)
    return lens + [1] * mixed, prefixes + [70] * mixed, mask + [False] * mixed, seqlens + [-1] * mixed


def batch(rng: random.Random, tracked: str, mixed: int, place):
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    mode = ForwardMode.MIXED if mixed else ForwardMode.EXTEND
    return make_batch(ForwardBatch, mode, *rows(rng, tracked, mixed), place)


@pytest.mark.parametrize("mixed", [0, 3])
@pytest.mark.parametrize("tracked", TRACKED)
def test_metadata_is_sglangs(flashinfer, tracked, mixed):
    stock, ours = flashinfer
    rng, planned = random.Random(f"{tracked} {mixed}"), 0
    for _ in range(60):
        forward = batch(rng, tracked, mixed, on_device)
        expected, found = metadata(stock, forward), metadata(ours, forward)
        assert found == expected
        planned += expected["num_state_checkpoints"] > 0
    assert (planned > 0) == (tracked in ("off a boundary", "either")), "the batches show nothing"


@pytest.mark.parametrize("mixed", [0, 3])
@pytest.mark.parametrize("tracked", TRACKED)
def test_no_read_from_the_device(flashinfer, tracked, mixed):
    _, ours = flashinfer
    rng = random.Random(7)
    for _ in range(10):
        forward = batch(rng, tracked, mixed, on_device)
        with watch() as reads:
            ours.init_forward_metadata(forward)
        assert reads == []


def test_the_watch_sees_sglangs_plan_reading(flashinfer):
    """Four tensors are copied to the host for it."""
    from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import maybe_build_flashinfer_checkpoint_plan

    stock, _ = flashinfer
    forward = batch(random.Random(3), "off a boundary", 0, on_device)
    stock.init_forward_metadata(forward)
    with watch() as reads:
        maybe_build_flashinfer_checkpoint_plan(forward, stock.forward_metadata, stock.device)
    assert reads.count("to host") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [0, 3])
def test_no_synchronisation_on_a_gpu(flashinfer, mixed):
    """The real thing: CUDA itself raises on any synchronising call."""
    stock, ours = flashinfer
    stock.device = ours.device = "cuda"
    rng = random.Random(11)
    for tracked in TRACKED:
        for _ in range(10):
            forward = batch(rng, tracked, mixed, torch.Tensor.cuda)
            expected = metadata(stock, forward)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                ours.init_forward_metadata(forward)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found = plain(ours.forward_metadata)
            assert {name: found[name] for name in PLAN} == {name: expected[name] for name in PLAN}


@pytest.mark.parametrize("tracked", TRACKED)
def test_plan_is_sglangs(sglang, monkeypatch, tracked):
    """SGLang's function on many random batches of CPU tensors."""
    from sglang.srt.layers.attention.linear.kernels import gdn_flashinfer

    size = snapshot_size()
    for name, value in {"get_server_args": SimpleNamespace(mamba_cache_chunk_size=size), SIZE: size}.items():
        if hasattr(gdn_flashinfer, name):
            monkeypatch.setattr(gdn_flashinfer, name, lambda value=value: value)
    rng = random.Random(tracked)
    for _ in range(400):
        lens, prefixes, mask, seqlens = rows(rng, tracked, rng.choice([0, 0, 2]))
        off = [row for row, on in enumerate(mask) if on and (seqlens[row] - prefixes[row]) % size]
        told = SimpleNamespace(track_ssm_h_src=torch.zeros(len(off)), track_ssm_h_dst=torch.zeros(len(off)))
        asked = SimpleNamespace(
            extend_seq_lens=torch.tensor(lens),
            extend_prefix_lens=torch.tensor(prefixes),
            mamba_track_mask=torch.tensor(mask),
            mamba_track_seqlens=torch.tensor(seqlens),
        )
        gdn_flashinfer.maybe_build_flashinfer_checkpoint_plan(asked, told, "cpu")
        plan = tracking.plan_checkpoints(HostTracking(mask, seqlens), lens, prefixes, every=size)
        assert len(plan.sources) == len(off)
        if off:
            assert plan.sources == told.track_ssm_h_src.tolist()
            assert plan.starts == told.state_checkpoint_cu_starts.tolist()
            assert plan.starts[-1] == told.num_state_checkpoints and told.state_checkpoint_every_n_tokens == size
