"""Every refusal names the flag, the value and the way out; nothing the plugin does not touch is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_mamba_mtp import guards, modes, names
from sglang_mamba_mtp.compat import startup
from sglang_mamba_mtp.errors import MtpError
from sglang_mamba_mtp.guards import COMMON, OWN_VERIFY

from ..arguments import arguments_read


def arguments(**changed) -> SimpleNamespace:
    """Resolved arguments of an ordinary speculative server."""
    plain = {
        "device": "cuda",
        "speculative_algorithm": "EAGLE",
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
        "enable_lmcache": False,
        "enable_unified_cache_external_linker": False,
        "enable_streaming_session": False,
        "enable_two_batch_overlap": False,
        "enable_mamba_cache_stochastic_rounding": False,
        "use_ray": False,
        "disaggregation_mode": "null",
        "pp_size": 1,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full")),
        "cuda_graph_backend_decode": None,
        "linear_attn_backend": "triton",
        "linear_attn_decode_backend": None,
        "linear_attn_verify_backend": None,
    }
    return SimpleNamespace(**{**plain, **changed})


REFUSED = [
    ({"device": "npu"}, "--device npu"),
    ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH"),
    ({"speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK"),
    ({"speculative_algorithm": "uno"}, "--speculative-algorithm UNO"),
    ({"speculative_algorithm": "NGRAM", "page_size": 64}, "--page-size 64"),
    ({"speculative_algorithm": "NGRAM", "attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
    ({"speculative_algorithm": "NGRAM", "decode_attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
    ({"enable_linear_replayssm": True}, "--enable-linear-replayssm True"),
    ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec True"),
    ({"enable_int8_mamba_checkpoint": True}, "--enable-int8-mamba-checkpoint True"),
    ({"enable_unified_memory": True}, "--enable-unified-memory True"),
    ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout True"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache True"),
    ({"enable_lmcache": True}, "--enable-lmcache True"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker True"),
    ({"enable_streaming_session": True}, "--enable-streaming-session True"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap True"),
    ({"use_ray": True}, "--use-ray True"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"pp_size": 2}, "--pp-size 2"),
    (
        {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="breakable"))},
        "--cuda-graph-backend-decode breakable",
    ),
]

REFUSED_WITH_OWN_VERIFY = [
    ({"linear_attn_verify_backend": "flashinfer"}, "--linear-attn-verify-backend flashinfer"),
    ({"linear_attn_verify_backend": "nv_cutedsl"}, "--linear-attn-verify-backend nv_cutedsl"),
    ({"linear_attn_decode_backend": "flashinfer"}, "--linear-attn-verify-backend flashinfer"),
    ({"linear_attn_backend": "flashinfer"}, "--linear-attn-verify-backend flashinfer"),
    ({"enable_mamba_cache_stochastic_rounding": True}, "--enable-mamba-cache-stochastic-rounding True"),
]


@pytest.mark.parametrize("changed, words", REFUSED + REFUSED_WITH_OWN_VERIFY)
def test_each_refusal_names_flag_value_and_remedy(changed, words):
    (text,) = guards.declined(arguments(**changed), COMMON + OWN_VERIFY)
    assert text.startswith(words)
    reason, _, remedy = text.removeprefix(words).partition("; ")
    assert reason.startswith((":", " (")) and remedy


def test_every_guard_has_a_case():
    tested = {words.split()[0] for _, words in REFUSED + REFUSED_WITH_OWN_VERIFY}
    assert tested == {guard.flag for guard in COMMON + OWN_VERIFY}


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
    ],
)
def test_ordinary_servers_pass(changed):
    assert guards.declined(arguments(**changed), COMMON + OWN_VERIFY) == []


def test_sglangs_own_verify_may_use_flashinfer():
    snapshot = modes.MODES[names.SNAPSHOT]
    assert guards.declined(arguments(linear_attn_verify_backend="flashinfer"), snapshot.guards) == []


def test_off_declines_nothing():
    assert modes.MODES[names.OFF].guards == ()


def test_a_missing_argument_is_refused_not_ignored():
    args = arguments()
    del args.enable_two_batch_overlap
    with pytest.raises(MtpError, match="--enable-two-batch-overlap"):
        guards.declined(args, COMMON)


def test_an_argument_that_only_some_versions_have_may_be_missing():
    args = arguments()
    del args.enable_unified_cache_external_linker
    assert guards.declined(args, COMMON) == []


def test_check_lists_everything_and_the_off_switch(monkeypatch):
    monkeypatch.setattr(startup, "resolved", lambda args: args)
    with pytest.raises(MtpError) as caught:
        guards.check(arguments(pp_size=2, enable_lmcache=True), COMMON, mode="snapshot", family="GDN")
    text = str(caught.value)
    for words in ("'snapshot'", "GDN", "--pp-size 2", "--enable-lmcache", "--mamba-mtp-mode off"):
        assert words in text


def test_arguments_exist_in_this_sglang(sglang):
    """Every field a guard reads is a server argument of the installed version."""
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__dataclass_fields__", None) or getattr(ServerArgs, "__struct_fields__", ())
    read = arguments_read(guard for guard in COMMON + OWN_VERIFY if not guard.optional)
    assert read and read <= set(fields), read - set(fields)
