"""Every refusal names the flag, the value and the way out; nothing the plugin does not touch is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp import config, guards, modes, names
from sglang_mamba_mtp.compat import startup
from sglang_mamba_mtp.errors import MtpError
from sglang_mamba_mtp.families.table import FAMILIES
from sglang_mamba_mtp.guards import COMMON, OWN_VERIFY, SGLANGS_VERIFY

from ..arguments import arguments_read


def arguments(**changed) -> SimpleNamespace:
    """Resolved arguments of an ordinary speculative server."""
    plain = {
        "device": "cuda",
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "speculative_adaptive": False,
        "speculative_adaptive_config": None,
        "mamba_backend": "triton",
        "page_size": 1,
        "attention_backend": "fa3",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "enable_linear_replayssm": False,
        "enable_linear_replayssm_spec": False,
        "enable_int8_mamba_checkpoint": False,
        "enable_unified_memory": False,
        "enable_page_major_kv_layout": False,
        "enable_hierarchical_cache": False,
        "hicache_storage_backend": None,
        "enable_lmcache": False,
        "enable_unified_cache_external_linker": False,
        "enable_streaming_session": False,
        "enable_two_batch_overlap": False,
        "enable_mamba_cache_stochastic_rounding": False,
        "disaggregation_mode": "null",
        "disaggregation_decode_enable_offload_kvcache": False,
        "pp_size": 1,
        "dcp_size": 1,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full")),
        "cuda_graph_backend_decode": None,
        "linear_attn_backend": "triton",
        "linear_attn_decode_backend": None,
        "linear_attn_verify_backend": None,
    }
    return SimpleNamespace(**{**plain, **changed})


REFUSED = [
    ({"device": "npu"}, "--device npu"),
    ({"speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK"),
    ({"speculative_algorithm": "uno"}, "--speculative-algorithm uno"),
    ({"speculative_algorithm": "my_spec"}, "--speculative-algorithm my_spec"),
    ({"speculative_algorithm": "NGRAM", "page_size": 64}, "--page-size 64"),
    ({"speculative_algorithm": "NGRAM", "attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
    ({"speculative_algorithm": "NGRAM", "decode_attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
    ({"enable_linear_replayssm": True}, "--enable-linear-replayssm True"),
    ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec True"),
    ({"enable_unified_memory": True}, "--enable-unified-memory True"),
    ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout True"),
    ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "--hicache-storage-backend file"),
    ({"enable_lmcache": True}, "--enable-lmcache True"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker True"),
    ({"enable_streaming_session": True}, "--enable-streaming-session True"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap True"),
    ({"enable_hierarchical_cache": True, "disaggregation_mode": "decode"}, "--enable-hierarchical-cache True"),
    ({"speculative_algorithm": "NGRAM", "disaggregation_mode": "decode"}, "--speculative-algorithm NGRAM"),
    ({"speculative_algorithm": "dflash", "disaggregation_mode": "decode"}, "--speculative-algorithm dflash"),
    ({"speculative_algorithm": "EAGLE3", "disaggregation_mode": "decode"}, "--speculative-algorithm EAGLE3"),
    ({"speculative_algorithm": "STANDALONE", "disaggregation_mode": "decode"}, "--speculative-algorithm STANDALONE"),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "decode"},
        "--speculative-algorithm FROZEN_KV_MTP",
    ),
    ({"disaggregation_decode_enable_offload_kvcache": True}, "--disaggregation-decode-enable-offload-kvcache True"),
    ({"pp_size": 2}, "--pp-size 2"),
    ({"dcp_size": 2}, "--dcp-size 2"),
    (
        {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="breakable"))},
        "--cuda-graph-backend-decode breakable",
    ),
]

NODES_65 = {"speculative_num_draft_tokens": 65}

REFUSED_WITH_OWN_VERIFY = [
    ({"speculative_eagle_topk": 4, **NODES_65}, "--speculative-num-draft-tokens 65"),
    ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 1, **NODES_65}, "--speculative-num-draft-tokens 65"),
    ({"speculative_num_steps": 64, **NODES_65}, "--speculative-num-steps 64"),
    ({"speculative_algorithm": "DFLASH", "speculative_num_steps": 1, **NODES_65}, "--speculative-num-draft-tokens 65"),
    ({"linear_attn_verify_backend": "flashinfer"}, "--linear-attn-verify-backend flashinfer"),
    ({"linear_attn_verify_backend": "nv_cutedsl"}, "--linear-attn-verify-backend nv_cutedsl"),
    (
        {"linear_attn_decode_backend": "flashinfer", "linear_attn_verify_backend": "flashinfer"},
        "--linear-attn-verify-backend flashinfer",
    ),
    ({"enable_mamba_cache_stochastic_rounding": True}, "--enable-mamba-cache-stochastic-rounding True"),
]


@pytest.mark.parametrize("changed, words", REFUSED + REFUSED_WITH_OWN_VERIFY)
def test_each_refusal_names_flag_value_and_remedy(changed, words):
    (text,) = guards.declined(arguments(**changed), COMMON + OWN_VERIFY, names.GDN)
    assert text.startswith(words)
    reason, _, remedy = text.removeprefix(words).partition("; ")
    assert reason.startswith((":", " (")) and remedy


def test_every_guard_has_a_case():
    tested = {words.split()[0] for _, words in REFUSED + REFUSED_WITH_OWN_VERIFY}
    # cases of their own, below
    tested |= {"--speculative-adaptive-config", "--mamba-backend", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"}
    assert tested == {guard.flag for guard in COMMON + OWN_VERIFY + SGLANGS_VERIFY}


def test_amd_gpus_which_sglang_calls_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    (text,) = guards.declined(arguments(), COMMON, names.GDN)
    assert text.startswith("--device cuda (ROCm 6.4.43482): ") and "NVIDIA" in text
    assert guards.declined(arguments(device="cpu"), COMMON, names.GDN) == []


def test_an_algorithm_of_another_plugin(forked):
    """As a plugin registers one, and as `sglang.launch_server` is told to use it."""

    def body():
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        SpeculativeAlgorithm.register("MY_SPEC", supports_overlap=True)(lambda server_args: object)
        model = str(Path(__file__).parents[2] / "launch" / "models" / "tiny-gdn")
        args = ServerArgs(model_path=model, device="cpu", speculative_algorithm="MY_SPEC")
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        guards.check(args, COMMON, mode="replay", family=names.GDN, model="GDN")

    result = forked(body)
    assert "MtpError" in result.output and "--speculative-algorithm MY_SPEC: it is not SGLang's own" in result.output


def test_a_preparation_that_is_replayed(sglang, monkeypatch):
    """By a variable that later versions have: the queue of the slots would be left as it is, and states read stale."""
    from sglang.srt.environ import envs

    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "true")
    found = guards.declined(arguments(), COMMON, names.GDN)
    assert len(found) == hasattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH")
    assert all(text.startswith("SGLANG_ENABLE_METADATA_GLUE_GRAPH True: ") for text in found)


@pytest.mark.parametrize("steps, nodes", [(63, None), (64, 65)])
def test_adaptive_speculation_by_its_longest_chain(steps, nodes, tmp_path):
    settings = tmp_path / "adaptive.json"
    settings.write_text(json.dumps({"1": {"candidate_steps": [1, 3]}, "4": {"candidate_steps": [steps]}}))
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": str(settings)}
    found = guards.declined(arguments(**adaptive), OWN_VERIFY, names.GDN)
    assert len(found) == (nodes is not None)
    assert all(text.startswith(f"--speculative-adaptive-config {settings}: ") for text in found)


@pytest.mark.parametrize("mode", [names.REPLAY, names.SLOTS, names.SNAPSHOT])
@pytest.mark.parametrize(
    "draft",
    [{}, {"speculative_algorithm": "DFLASH"}, {"speculative_eagle_topk": 3}, {"speculative_algorithm": "NGRAM"}],
)
def test_flashinfers_mamba_kernel_verifies_chains(mode, draft):
    """It verifies where SGLang's kernels do. GDN has none of it."""
    flashinfer = arguments(mamba_backend="flashinfer", **draft)
    found = guards.declined(flashinfer, modes.MODES[mode].guards, names.MAMBA2)
    chain = draft in ({}, {"speculative_algorithm": "DFLASH"})
    assert len(found) == bool(mode == names.SNAPSHOT and not chain)
    assert all(text.startswith("--mamba-backend flashinfer: ") and "chains" in text for text in found)
    assert guards.declined(flashinfer, modes.MODES[mode].guards, names.GDN) == []


@pytest.mark.parametrize("family", [names.GDN, names.MAMBA2])
def test_a_window_that_fits_no_gpu(family):
    longest = FAMILIES[family].longest_window
    for window, spelling in ((longest, None), (longest + 1, "--mamba-mtp-window"), (10**9, "SGLANG_MAMBA_MTP_WINDOW=")):
        environ = {"SGLANG_MAMBA_MTP_WINDOW": str(window)}
        if spelling is not None and spelling.startswith("--"):
            environ[config.SPELLINGS] = "window=flag"
        refusals = guards.window_too_long(config.MtpConfig.from_env(environ), family)
        assert len(refusals) == (spelling is not None)
        for text in refusals:
            assert text.startswith(spelling) and str(window) in text and f"use at most {longest}" in text


TRACKED = {"disable_radix_cache": False, "disable_overlap_schedule": False}


@pytest.mark.parametrize("interval, refused", [(31, True), (32, False)])
def test_snapshots_that_two_verifies_may_write(monkeypatch, interval, refused):
    """Two verifies of 16 nodes cross boundaries that are 31 tokens apart, and no two that are 32."""
    monkeypatch.setattr(startup, "resolved", lambda args: args)
    monkeypatch.setattr(startup, "snapshot_interval", lambda args: args.mamba_track_interval)
    nodes = {"speculative_num_draft_tokens": 16, "mamba_track_interval": interval}
    tracked = arguments(**nodes, **TRACKED, mamba_radix_cache_strategy="extra_buffer")
    found = guards.snapshots_too_close(tracked)
    assert len(found) == refused
    assert all(text.startswith("--mamba-track-interval 31: ") and "use 32 or more" in text for text in found)
    for changed in (
        {"disable_radix_cache": True},
        {"disable_overlap_schedule": True},
        {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
        {"mamba_radix_cache_strategy": "no_buffer"},
    ):
        assert guards.snapshots_too_close(SimpleNamespace(**{**vars(tracked), **changed})) == []


@pytest.mark.parametrize(
    "strategy, disabled, refused", [("auto", False, 1), ("auto", True, 0), ("no_buffer", False, 0)]
)
def test_a_radix_cache_without_a_strategy(monkeypatch, strategy, disabled, refused):
    monkeypatch.setattr(startup, "resolved", lambda args: args)
    monkeypatch.setattr(startup, "model_class", lambda args: type("New", (), {}))
    args = SimpleNamespace(mamba_radix_cache_strategy=strategy, disable_radix_cache=disabled)
    found = guards.no_radix_strategy(args)
    assert len(found) == refused
    assert all(text.startswith("--mamba-radix-cache-strategy auto: ") and "New" in text for text in found)


@pytest.mark.parametrize(
    "algorithm, hidden, refused", [("DFLASH", "Bare", 1), ("DFLASH", None, 0), ("EAGLE", "Bare", 0)]
)
def test_a_model_that_hides_its_inner_states(monkeypatch, algorithm, hidden, refused):
    monkeypatch.setattr(startup, "resolved", lambda args: args)
    monkeypatch.setattr(startup, "hides_inner_states", lambda args: hidden)
    found = guards.no_inner_states(arguments(speculative_algorithm=algorithm))
    assert len(found) == refused
    assert all(text.startswith("--speculative-algorithm DFLASH: ") and "Bare" in text for text in found)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "NGRAM", "page_size": 64, "attention_backend": "flashinfer"},
        {"page_size": 64},
        {"attention_backend": "trtllm_mha"},
        {"device": "cpu"},
        {"linear_attn_decode_backend": "flashinfer", "linear_attn_verify_backend": "triton"},
        {"linear_attn_decode_backend": "cutedsl"},
        {"linear_attn_decode_backend": "flashinfer"},  # its verify, which SGLang derives from it, is overridden
        {"linear_attn_backend": "flashinfer"},
        {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 64},
        {"speculative_num_steps": 63, "speculative_num_draft_tokens": 64},
        {"speculative_algorithm": "FROZEN_KV_MTP"},
        {"speculative_algorithm": "EAGLE3"},
        {"speculative_algorithm": "EAGLE", "disaggregation_mode": "decode"},
        {"speculative_algorithm": "nextn", "disaggregation_mode": "decode"},
        {"speculative_algorithm": "EAGLE3", "disaggregation_mode": "prefill"},
        {"speculative_algorithm": "DFLASH", "speculative_num_steps": 1, "speculative_num_draft_tokens": 64},
    ],
)
def test_ordinary_servers_pass(changed):
    assert guards.declined(arguments(**changed), COMMON + OWN_VERIFY, names.MAMBA2) == []


def test_sglangs_own_verify_may_use_flashinfer():
    snapshot = modes.MODES[names.SNAPSHOT]
    assert guards.declined(arguments(linear_attn_verify_backend="flashinfer"), snapshot.guards, names.GDN) == []


def test_off_declines_nothing():
    assert modes.MODES[names.OFF].guards == ()


def test_a_missing_argument_is_refused_not_ignored():
    args = arguments()
    del args.enable_two_batch_overlap
    with pytest.raises(MtpError, match="--enable-two-batch-overlap"):
        guards.declined(args, COMMON, names.GDN)


def test_an_argument_that_only_some_versions_have_may_be_missing():
    args = arguments()
    del args.enable_unified_cache_external_linker
    assert guards.declined(args, COMMON, names.GDN) == []


def test_check_lists_everything_and_the_off_switch(monkeypatch):
    monkeypatch.setattr(startup, "resolved", lambda args: args)
    monkeypatch.setenv("SGLANG_MAMBA_MTP_WINDOW", "1000")
    args = arguments(pp_size=2, enable_lmcache=True, disable_radix_cache=True)
    with pytest.raises(MtpError) as caught:
        guards.check(args, COMMON, mode="replay", family=names.GDN, model="GDN")
    text = str(caught.value)
    for words in ("'replay'", "GDN", "--pp-size 2", "--enable-lmcache", "_WINDOW=1000", "--mamba-mtp-mode off"):
        assert words in text


def test_arguments_exist_in_this_sglang(sglang):
    """Every field a guard reads is a server argument of the installed version."""
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__dataclass_fields__", None) or getattr(ServerArgs, "__struct_fields__", ())
    read = arguments_read(guard for guard in COMMON + OWN_VERIFY if not guard.optional)
    assert read and read <= set(fields), read - set(fields)
