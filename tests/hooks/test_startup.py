"""What a server does with the plugin installed: refuses early, leaves alone what is not ours, says what it serves."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_mamba_mtp import names
from sglang_mamba_mtp.compat import startup, surfaces, version
from sglang_mamba_mtp.errors import MtpError

from .test_registry import launch, load_plugins

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="forks CPU engines")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> str:
    """A dense model: a configuration is enough, weights are made up."""
    folder = tmp_path_factory.mktemp("dense")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory) -> dict[str, str]:
    """Checkpoints of hybrid models by family."""
    from tests.engine import models

    return {
        family: str(models.WRITERS[family](tmp_path_factory.mktemp(family), 0)) for family in (names.GDN, names.MAMBA2)
    }


def build(model: str, **spec):
    """A scheduler with the plugin loaded, as its process builds it."""
    from tests.engine.child import build_scheduler
    from tests.engine.spec import EngineSpec

    load_plugins()
    return build_scheduler(EngineSpec(model=model, **spec))


def announced(output: str) -> str:
    lines = [line for line in output.splitlines() if "mamba-mtp 0." in line]
    assert len(lines) == 1, output[-3000:]
    return lines[0].partition("mamba-mtp ")[2]


def test_a_dense_model_is_served_untouched(forked, dense, sglang):
    def body():
        runner = build(dense, radix=None, extra={"load_format": "dummy"}).tp_worker.model_runner
        assert not type(runner.attn_backend).__module__.startswith("sglang_mamba_mtp.backends")

    result = forked(body)
    assert result.code == 0, result.output
    assert "dense model" in announced(result.output) and f"SGLang {sglang} serves unchanged" in result.output


def test_off_leaves_a_hybrid_model_to_sglang(forked, hybrid):
    def body():
        runner = build(hybrid[names.GDN], spec="NEXTN").tp_worker.model_runner
        assert type(runner.attn_backend.linear_attn_backend).__module__.startswith("sglang.")
        assert type(runner.req_to_token_pool.mamba_pool).__module__.startswith("sglang.")

    result = forked(body, SGLANG_MAMBA_MTP_MODE="off")
    assert result.code == 0, result.output
    assert "mamba-mtp" not in result.output


@pytest.mark.parametrize("family, name, spec", [(names.GDN, "GDN", "NEXTN"), (names.MAMBA2, "Mamba2", "NGRAM")])
def test_the_log_line_says_what_is_served(forked, hybrid, sglang, family, name, spec):
    """Mode, kind of model, bytes really allocated for speculation, version; the bytes are those of the tensors."""

    def body():
        pool = build(hybrid[family], spec=spec).tp_worker.model_runner.req_to_token_pool.mamba_pool
        cache = pool.mamba_cache
        tensors = [cache.intermediate_ssm, *cache.intermediate_conv_window]
        print("allocated:", sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20)

    result = forked(body, SGLANG_MAMBA_MTP_MODE="snapshot")
    assert result.code == 0, result.output
    line = announced(result.output)
    for words in ("mode snapshot", f"{name} model", "state slots", f"SGLang {sglang}"):
        assert words in line
    (said,) = re.findall(r"speculative state ([\d.]+) MiB", line)
    (allocated,) = re.findall(r"allocated: ([\d.]+)", result.output)
    assert float(said) == pytest.approx(float(allocated), abs=0.06) and float(said) > 0


@pytest.mark.parametrize("mode, expected", [("snapshot", (2, 3)), ("off", (1, 6))])
def test_ngram_at_breadth_1_is_a_tree(forked, hybrid, dense, mode, expected):
    """For the models the plugin serves; the corpus is still searched as asked."""

    def resolve(model: str):
        from sglang.srt.server_args import ServerArgs

        from tests.engine.spec import EngineSpec

        spec = EngineSpec(model=model, spec="NGRAM", bfs_breadth=1, draft_tokens=6)
        args = ServerArgs(**spec.server_args())
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        args = startup.resolved(args)
        assert args.speculative_ngram_max_bfs_breadth == 1
        return args.speculative_eagle_topk, args.speculative_num_steps

    def body():
        load_plugins()
        for family in hybrid:
            assert resolve(hybrid[family]) == expected
        assert resolve(dense)[0] == 1

    result = forked(body, SGLANG_MAMBA_MTP_MODE=mode)
    assert result.code == 0, result.output


def test_draft_models_and_unspeculative_servers_are_sglangs(forked, hybrid):
    def body():
        scheduler = build(hybrid[names.GDN], spec="NEXTN")
        draft = scheduler.draft_worker.draft_worker.draft_runner
        for part in (draft.attn_backend, getattr(draft.attn_backend, "linear_attn_backend", None)):
            assert not type(part).__module__.startswith("sglang_mamba_mtp.backends")

    result = forked(body, SGLANG_MAMBA_MTP_MODE="snapshot")
    assert result.code == 0, result.output

    result = forked(lambda: build(hybrid[names.GDN], spec=None), SGLANG_MAMBA_MTP_MODE="snapshot")
    assert result.code == 0, result.output
    assert "no speculative decoding" in announced(result.output)


def test_a_declined_flag_stops_the_launch(forked, hybrid):
    """Before any process is started; and again where a model runner is built without a launcher."""
    speculative = ("--speculative-algorithm", "NEXTN", "--device", "cpu", "--enable-streaming-session")
    result = forked(lambda: launch("--model-path", hybrid[names.GDN], "--mamba-mtp-mode", "snapshot", *speculative))
    assert result.code == 1
    assert "--enable-streaming-session True" in result.output and "--mamba-mtp-mode off" in result.output
    assert "Traceback" not in result.output

    result = forked(
        lambda: build(hybrid[names.GDN], spec="NEXTN", extra={"enable_streaming_session": True}),
        SGLANG_MAMBA_MTP_MODE="snapshot",
    )
    assert result.code == 1 and "--enable-streaming-session True" in result.output


def checked(model: str, **given) -> object:
    """Server arguments as a launcher has them before it starts a process."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True, **given)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    args.check_server_args()
    return startup.resolved(args)


@pytest.mark.parametrize("mode, verify", [("replay", "triton"), ("slots", "triton"), ("snapshot", None)])
def test_a_derived_verify_backend_is_overridden(forked, hybrid, dense, mode, verify):
    """SGLang would verify with FlashInfer where it decodes with it; only a verify of its own may."""

    def body():
        logging.basicConfig(force=True)  # pytest's handlers keep to themselves what they are told here
        load_plugins()
        chain = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
        chain["speculative_num_draft_tokens"] = 4
        for field in ("linear_attn_decode_backend", "linear_attn_prefill_backend"):
            args = checked(hybrid[names.GDN], **chain, **{field: "flashinfer"})
            expected = verify if field == "linear_attn_decode_backend" else None
            assert args.linear_attn_verify_backend == expected, (field, args.linear_attn_verify_backend)
            assert getattr(args, field) == "flashinfer"
        assert checked(hybrid[names.GDN], linear_attn_decode_backend="flashinfer").linear_attn_verify_backend is None
        assert checked(dense, linear_attn_decode_backend="flashinfer").linear_attn_verify_backend is None

    result = forked(body, SGLANG_MAMBA_MTP_MODE=mode)
    assert result.code == 0, result.output
    assert result.output.count(f"mode {mode} verifies with its own kernels, not with flashinfer's") == (
        verify is not None
    )


def test_a_verify_backend_that_is_named_is_declined(forked, hybrid):
    def body():
        load_plugins()
        chain = {"speculative_algorithm": "NEXTN", "linear_attn_verify_backend": "flashinfer"}
        with pytest.raises(MtpError, match="--linear-attn-verify-backend flashinfer: it verifies into SGLang's"):
            checked(hybrid[names.GDN], **chain)

    result = forked(body)
    assert result.code == 0, result.output


@pytest.mark.parametrize("strategy", ["auto", "extra_buffer"])
def test_a_model_that_sglang_chooses_no_radix_strategy_for(forked, sglang, strategy):
    """Qwen3.5's class for text alone, which 0.5.17's lists lack and 0.5.23's have."""
    model = Path(__file__).parents[2] / "launch" / "shapes" / "qwen3.5-35b-a3b"
    given = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
    given |= {"speculative_num_draft_tokens": 4, "mamba_radix_cache_strategy": strategy}

    def body():
        load_plugins()
        checked(str(model), **given)

    result = forked(body)
    refused = sglang == "0.5.17" and strategy == "auto"
    assert (result.code != 0) == refused, result.output[-3000:]
    words = "the installed SGLang does not know Qwen3_5MoeForCausalLM and chooses no strategy for it"
    assert (words in result.output) == refused, result.output[-3000:]


def test_every_refusal_is_in_one_message(forked, hybrid):
    """Of flags and of an option, as they were spelled; and no traceback around it."""
    speculative = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "65", "--device", "cpu")
    flags = ("--mamba-mtp-window", "1000", "--enable-streaming-session")
    result = forked(lambda: launch("--model-path", hybrid[names.MAMBA2], *speculative, *flags))
    assert result.code == 1 and "Traceback" not in result.output, result.output
    *_, declined = result.output.partition("cannot serve this Mamba2 model:")
    for spelled in ("--mamba-mtp-window 1000", "--speculative-num-draft-tokens 65", "--enable-streaming-session True"):
        assert declined.count(f"- {spelled}: ") == 1, declined
    assert "SGLANG_MAMBA_MTP_WINDOW" not in declined


def test_a_program_gets_an_exception_it_can_read(forked, hybrid):
    """`sglang.Engine` raises; nothing ends the process."""

    def body():
        import sglang

        load_plugins()
        options = {"speculative_algorithm": "NEXTN", "device": "cpu", "enable_streaming_session": True}
        with pytest.raises(MtpError, match=r"--enable-streaming-session True: .*\n.*--mamba-mtp-mode off"):
            sglang.Engine(model_path=hybrid[names.GDN], **options)
        print("and goes on")

    result = forked(body)
    assert result.code == 0 and "and goes on" in result.output, result.output


def test_sglang_building_another_backend_is_refused(forked, hybrid):
    """If SGLang stops taking the backend by the name we swap, stock code must not serve under our name."""

    def body():
        load_plugins()
        surfaces.backend_name = lambda family: (version, "SUPPORTED")
        build(hybrid[names.GDN], spec="NEXTN")

    result = forked(body, SGLANG_MAMBA_MTP_MODE="snapshot")
    assert result.code == 1 and "refusing to serve" in result.output


@pytest.mark.slow
def test_a_worker_that_refuses_stops_the_server(hybrid, tmp_path):
    """The launcher is fine, its scheduler process finds an SGLang it does not support."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import importlib.metadata, sys
            if any("spawn_main" in argument for argument in sys.orig_argv):
                version = importlib.metadata.version
                importlib.metadata.version = lambda name: "0.9.9" if name == "sglang" else version(name)
            """
        )
    )
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", hybrid[names.GDN], "--device", "cpu"]
    options = ["--speculative-algorithm", "NEXTN", "--max-total-tokens", "2048", "--skip-tokenizer-init"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([*command, *options], capture_output=True, text=True, env=env, timeout=500)
    assert run.returncode != 0
    assert "SGLang 0.9.9 is installed" in run.stderr and version.SUPPORTED in run.stderr


def test_bench_one_batch_loads_the_plugin(forked):
    def body():
        import runpy

        sys.argv = ["bench_one_batch", "--help"]
        runpy.run_module("sglang_mamba_mtp.bench_one_batch", run_name="__main__", alter_sys=True)

    result = forked(body)
    assert result.code == 0 and "--mamba-mtp-mode" in result.output and "--input-len" in result.output


OBSTACLES = {
    "--page-size 256": {"page_size": 256},
    "--mamba-radix-cache-strategy extra_buffer_lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "--disable-radix-cache": {"disable_radix_cache": True},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--disable-overlap-schedule": {"disable_overlap_schedule": True},
    "--disaggregation-mode decode": {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"},
}


@pytest.fixture(params=OBSTACLES)
def obstacle(request, hybrid, sglang) -> tuple[str, Callable[[], object]]:
    """What stands against rewinding, and how to build an engine with it."""
    flag = request.param
    if "mixed" in flag and sglang in ("0.5.17", "0.5.18"):
        pytest.skip("SGLang turns mixed chunks off under speculation")
    asked = {"mamba_radix_cache_strategy": "auto"} | OBSTACLES[flag]
    return flag, lambda: build(hybrid[names.GDN], spec="NEXTN", overlap=True, track_interval=256, extra=asked)


def test_rewinding_says_what_stands_against_it(forked, obstacle):
    flag, build_it = obstacle

    def body():
        with pytest.raises(MtpError) as refusal:
            build_it()
        print("refused:", refusal.value)

    result = forked(body, SGLANG_MAMBA_MTP_RADIX="rewind")
    assert result.code == 0, result.output
    assert f"refused: SGLANG_MAMBA_MTP_RADIX=rewind: requests' states cannot be rewound with {flag}" in result.output


@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_rewinding_server_takes_two_slots_a_request(forked, hybrid, page):
    """Which is what replay does if it is told nothing."""

    def body():
        auto = {"mamba_radix_cache_strategy": "auto", "page_size": page}
        build(hybrid[names.GDN], spec="NEXTN", overlap=True, max_running_requests=64, track_interval=64, extra=auto)

    result = forked(body)
    assert result.code == 0, result.output
    assert "48 state slots, up to 24 requests (2 slots each), radix rewind, " in announced(result.output)


def test_without_being_asked_to_rewind_a_server_says_why_it_does_not(forked, obstacle):
    flag, build_it = obstacle
    result = forked(build_it)
    assert result.code == 0, result.output
    assert f" (not rewound with {flag}" in announced(result.output)


def test_without_speculation_nothing_is_rewound(forked, hybrid):
    """SGLang's slots a request stay SGLang's: its requests hold what it reserves for them."""

    def body():
        auto = {"mamba_radix_cache_strategy": "auto"}
        runner = build(
            hybrid[names.GDN], overlap=True, max_running_requests=64, track_interval=64, extra=auto
        ).tp_worker.model_runner
        print("a request holds", runner.kv_cache_configurator._calculate_mamba_ratio())

    result = forked(body, SGLANG_MAMBA_MTP_RADIX="rewind")
    assert result.code == 0, result.output
    assert "a request holds 5" in result.output
