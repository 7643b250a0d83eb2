"""Metadata of our backends: equal to SGLang's on every batch, without reading from the device; tree links for NGRAM."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp.compat import batches
from sglang_mamba_mtp.errors import MtpError
from sglang_mamba_mtp.tracking import HostTracking

from ..devices import DEVICE, on_device, watch

CHUNK = 16
SNAPSHOT = {True: 32, False: 16}  # 0.5.17 knows one size only
CONV = 3
SIZE = "mamba_cache_chunk_size"
FAMILIES = ("gdn", "mamba2")


@pytest.fixture
def backends(sglang, monkeypatch):
    """``backends(family)``: SGLang's backend and ours, made without a model, on the pretend device."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hl
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.model_executor import forward_batch_info

    from sglang_mamba_mtp import modes

    size = SNAPSHOT[batches.schedule_batch_has_host_tracking()]
    for module in (runtime_context, hl, forward_batch_info):
        for name, value in {"get_server_args": SimpleNamespace(mamba_cache_chunk_size=size), SIZE: size}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda value=value: value)
    stock = {"gdn": gdn_backend.GDNAttnBackend, "mamba2": hl.Mamba2AttnBackend}

    def make(family: str, topk: int = 1):
        made = []
        for cls in (stock[family], modes.MODES["snapshot"].backends[family]):
            backend = object.__new__(cls)
            backend.topk, backend.device, backend.pad_slot_id = topk, DEVICE, -1
            backend.conv_states_shape = (8, 24, CONV)
            backend.req_to_token_pool = pool()
            backend._fused_state_indices_ok = False
            backend._graph_seq_len_fill_value = 1
            backend.enable_mis = False
            backend.kernel_dispatcher = SimpleNamespace(
                extend_uses_state_checkpoints=False,
                target_verify_supports_strided_qkv=lambda parents: True,
            )
            backend.state_indices_list, backend.query_start_loc_list = [], []
            backend.retrieve_next_token_list, backend.retrieve_next_sibling_list = [], []
            backend.retrieve_parent_token_list = []
            if isinstance(getattr(cls, "mamba_chunk_size", None), property):
                backend._mamba_chunk_size = CHUNK
            else:
                backend.mamba_chunk_size = CHUNK
            made.append(backend)
        return made

    return make


def pool():
    """A request pool: row r lives in state slot 100 + r."""
    cache = SimpleNamespace(replayssm_rawv=None, replayssm_d=None, temporal=torch.zeros(1))
    return SimpleNamespace(
        get_mamba_indices=lambda rows: torch.where(rows > 0, rows + 100, 0).to(torch.int32),  # row 0 is nobody's
        translate_mamba_indices=lambda slots: slots,
        mamba_pool=SimpleNamespace(
            replayssm_write_pos=None, enable_linear_replayssm=False, mamba_cache=cache, size=300, replayssm_is_kda=False
        ),
    )


def prefill_batch(rng: random.Random, tracked: str, mixed: int = 0, place=on_device):
    """A prefill of 1 to 6 rows (and ``mixed`` decode rows) with host copies as the scheduler leaves them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    rows = rng.randint(1, 6)
    lens = [rng.choice([rng.randint(1, 5 * CHUNK), CHUNK * rng.randint(1, 4)]) for _ in range(rows)]
    prefixes = [rng.choice([0, CHUNK * rng.randint(0, 3), rng.randint(0, 50)]) for _ in range(rows)]
    seqlens, mask = [], []
    for length, prefix in zip(lens, prefixes, strict=True):
        mask.append(tracked != "none" and length >= CHUNK and rng.random() < 0.8)
        ends = {
            "aligned": CHUNK * (length // CHUNK),
            "unaligned": CHUNK * rng.randint(1, max(1, length // CHUNK)) + 1,
            "as scheduled": rng.choice([length, CHUNK * (length // CHUNK) + 1]),
        }
        seqlens.append(prefix + ends.get(tracked, length) if mask[-1] else -1)
    lens += [1] * mixed
    prefixes += [rng.randint(1, 90) for _ in range(mixed)]
    mask += [False] * mixed
    seqlens += [-1] * mixed
    mode = ForwardMode.MIXED if mixed else ForwardMode.EXTEND
    return make_batch(ForwardBatch, mode, lens, prefixes, mask, seqlens, place)


def make_batch(cls, mode, lens, prefixes, mask, seqlens, place):
    size = len(lens)
    starts = [sum(lens[:row]) for row in range(size)]
    device = {
        "extend_seq_lens": torch.tensor(lens, dtype=torch.int32),
        "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
        "extend_start_loc": torch.tensor(starts, dtype=torch.int32),
        "mamba_track_mask": torch.tensor(mask),
        "mamba_track_seqlens": torch.tensor(seqlens),
        "mamba_track_indices": torch.arange(200, 200 + size),
        "req_pool_indices": torch.randperm(size) + 1,
        "seq_lens": torch.tensor([a + b for a, b in zip(lens, prefixes, strict=True)]),
        "input_ids": torch.zeros(sum(lens), dtype=torch.int64),
        "out_cache_loc": torch.zeros(sum(lens), dtype=torch.int64),
    }
    batch = cls(
        forward_mode=mode,
        batch_size=size,
        seq_lens_sum=sum(lens) + sum(prefixes),
        extend_num_tokens=sum(lens),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=prefixes,
        **{name: place(value) for name, value in device.items()},
    )
    if batches.schedule_batch_has_host_tracking():
        batch.mamba_prefill_track_mask_cpu, batch.mamba_track_seqlens_cpu = mask, seqlens
    else:
        batches.attach_host_tracking(batch, HostTracking(mask, seqlens))
    return batch


def plain(value):
    """``value`` to compare: tensors as nested lists, records as dicts."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor).to(torch.int64).tolist()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def metadata(backend, batch) -> dict:
    """What the layers of a forward read."""
    backend.init_forward_metadata(batch)
    return plain(backend.forward_metadata)


@pytest.mark.parametrize("mixed", [0, 3])
@pytest.mark.parametrize("tracked", ["aligned", "unaligned", "as scheduled", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_stock(backends, family, tracked, mixed):
    stock, ours = backends(family)
    rng = random.Random(f"{family} {tracked} {mixed}")
    for _ in range(40):
        batch = prefill_batch(rng, tracked, mixed)
        expected, found = metadata(stock, batch), metadata(ours, batch)
        differing = {name for name in expected if expected[name] != found[name]}
        if family == "mamba2":  # SGLang's Mamba2 drops what its mixer does not read
            differing -= {"track_chunk_idx", "track_ssm_h_batch_src"}
        assert not differing, {name: (expected[name], found[name]) for name in differing}


@pytest.mark.parametrize("mixed", [0, 3])
@pytest.mark.parametrize("tracked", ["aligned", "unaligned", "as scheduled", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_read_from_the_device(backends, family, tracked, mixed):
    _, ours = backends(family)
    rng = random.Random(7)
    for _ in range(10):
        batch = prefill_batch(rng, tracked, mixed)
        with watch() as reads:
            ours.init_forward_metadata(batch)
        assert reads == []


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_synchronisation_on_a_gpu(backends, family, mixed):
    """The real thing: CUDA itself raises on any synchronising call."""
    stock, ours = backends(family)
    stock.device = ours.device = "cuda"
    rng = random.Random(11)
    for tracked in ("as scheduled", "unaligned", "aligned"):
        for _ in range(10):
            batch = prefill_batch(rng, tracked, mixed, place=torch.Tensor.cuda)
            expected = metadata(stock, batch)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                ours.init_forward_metadata(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found = plain(ours.forward_metadata)
            for name in ("track_conv_indices", "track_ssm_h_src", "track_ssm_final_dst", "conv_states_mask_indices"):
                assert found[name] == expected[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_watch_sees_stock_reading(backends, family):
    """0.5.17 reads ten times or more; 0.5.23 still does for Mamba2."""
    stock, _ = backends(family)
    batch = prefill_batch(random.Random(3), "unaligned")
    with watch() as reads:
        stock.init_forward_metadata(batch)
    if not batches.schedule_batch_has_host_tracking():
        assert reads.count("cpu") == 6 and reads.count("nonzero") == 1 and "__bool__" in reads, reads
    elif family == "mamba2":
        assert "nonzero" in reads, reads


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_decode_does_not_read(backends, family):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    _, ours = backends(family)
    batch = prefill_batch(random.Random(5), "as scheduled")
    batch.forward_mode = ForwardMode.DECODE
    batch.extend_num_tokens = batch.extend_seq_lens_cpu = batch.extend_prefix_lens_cpu = None
    with watch() as reads:
        ours.init_forward_metadata(batch)
    assert reads == []
    assert batch.mamba_track_mask is not None, "the layers still need the mask"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_host_copies_sglang_does_it(backends, family):
    stock, ours = backends(family)
    rng = random.Random(4)
    for _ in range(20):
        batch = prefill_batch(rng, "unaligned")
        batch.mamba_track_mask = batch.mamba_track_mask.clone()
        for name in ("mamba_prefill_track_mask_cpu", "mamba_track_seqlens_cpu"):
            if hasattr(batch, name):
                setattr(batch, name, None)
        assert metadata(ours, batch) == metadata(stock, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_a_slot_has_nobodys(backends, family):
    """What an idle rank prefills beside the others: SGLang gives it slot -1 up to 0.5.20, later slot 0 as well."""
    _, ours = backends(family)
    batch = prefill_batch(random.Random(8), "none")
    slots = ours._forward_metadata(batch).mamba_cache_indices.tolist()
    assert min(slots) > 0
    batch._original_batch_size = 0
    batch.req_pool_indices = torch.zeros_like(batch.req_pool_indices)
    assert set(plain(ours._forward_metadata(batch).mamba_cache_indices)) == {0}


def test_host_copies_are_dropped_with_the_tensor_they_mirror():
    batch = SimpleNamespace(mamba_track_mask=torch.tensor([True, False]))
    batches.attach_host_tracking(batch, HostTracking([True, False], [5, -1]))
    assert batches.host_tracking(batch) is not None
    batch.mamba_track_mask = batch.mamba_track_mask[:1]
    assert batches.host_tracking(batch) is None


# --------------------------------------------------------------------------------------------------------- tree links


def ngram_verify(bs: int, nodes: int):
    """A TARGET_VERIFY batch whose links say "every node hangs on the root"."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    links = torch.full((bs, nodes), -1)
    links[:, 0] = 1
    siblings = torch.full((bs, nodes), -1)
    siblings[:, 1:-1] = torch.arange(2, nodes)
    tokens = torch.zeros(bs * nodes, dtype=torch.int64)
    info = NgramVerifyInput(
        draft_token=tokens,
        custom_mask=torch.ones(bs * nodes * nodes, dtype=torch.bool),
        positions=tokens,
        retrieve_index=links,
        retrieve_next_token=links,
        retrieve_next_sibling=siblings,
        draft_token_num=nodes,
    )
    info.ragged_verify_layout = None
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=tokens,
        req_pool_indices=torch.arange(1, bs + 1),
        seq_lens=torch.full((bs,), 40),
        seq_lens_cpu=torch.full((bs,), 40),
        out_cache_loc=tokens,
        seq_lens_sum=40 * bs,
        spec_info=info,
    )


def test_links_reach_the_layers(backends):
    """Eager, capture, replay (with a padded row) and the plan stream's fix-up all hand on the tree."""
    bs, nodes = 2, 4
    for family in FAMILIES:
        _, ours = backends(family, topk=2)
        ours.device = "cpu"
        batch = ngram_verify(bs, nodes)
        links, siblings = batch.spec_info.retrieve_next_token, batch.spec_info.retrieve_next_sibling
        ours.init_forward_metadata(batch)
        assert torch.equal(ours.forward_metadata.retrieve_next_token, links)
        assert torch.equal(ours.forward_metadata.retrieve_next_sibling, siblings)
        assert ours.forward_metadata.retrieve_parent_token is not None

        ours.replayssm_write_pos_list = None
        ours.init_cuda_graph_state(3, 3 * nodes)
        captured = ngram_verify(3, nodes)
        captured.spec_info.retrieve_next_token = captured.spec_info.retrieve_next_sibling = None
        ours.init_forward_metadata_out_graph(captured, in_capture=True)
        seen = ours.forward_metadata.retrieve_next_token, ours.forward_metadata.retrieve_next_sibling
        assert seen[0] is not None

        replayed = ngram_verify(3, nodes)
        replayed.seq_lens_cpu[-1] = 1  # a padded row
        replayed.spec_info.retrieve_next_token, replayed.spec_info.retrieve_next_sibling = links, siblings
        ours.init_forward_metadata_out_graph(replayed)
        assert torch.equal(seen[0][:bs], links.int()) and torch.equal(seen[1][:bs], siblings.int())

        for buffer in seen:
            buffer.zero_()
        ours.update_verify_buffers_to_fill_after_draft(replayed.spec_info, 3)
        assert torch.equal(seen[0][:bs], links.int()) and torch.equal(seen[1][:bs], siblings.int())


def test_ngram_is_never_taken_for_a_chain(sglang, monkeypatch):
    from sglang_mamba_mtp.backends import prefill

    class Stock:
        topk = 1

        def __init__(self, runner):
            pass

    class Ours(prefill.MtpLinearBackend, Stock):
        pass

    def runner(ngram):
        return SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: ngram))

    assert Ours(runner(False)).topk == 1
    with pytest.raises(MtpError, match="topk 1"):
        Ours(runner(True))


@pytest.mark.parametrize("real", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_padded_batch_has_links(backends, family, real):
    """MLP sync pads slots and rows; an idle rank brings no links at all. SGLang's own verify reads as many as it has
    rows, and writes as many parents."""
    _, ours = backends(family, topk=2)
    ours.device = "cpu"
    batch = ngram_verify(3, 4)
    info = batch.spec_info
    given = {name: getattr(info, name)[:real] for name in ("retrieve_next_token", "retrieve_next_sibling")}
    for name, links in given.items():
        setattr(info, name, links)
    ours.init_forward_metadata(batch)
    for name, links in given.items():
        seen = getattr(ours.forward_metadata, name)
        assert seen.tolist() == [*links.tolist(), *[[-1] * 4] * (3 - real)]
    assert ours.forward_metadata.retrieve_parent_token.shape == (3, 4)
