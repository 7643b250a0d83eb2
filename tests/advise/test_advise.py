"""Advice against the server that follows it, on a CPU with a given amount of memory."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from sglang_mamba_mtp import advice as arithmetic
from sglang_mamba_mtp import advise
from sglang_mamba_mtp.cpu.defaults import CONV_DTYPE

from ..engine import draft_models, models

MODELS = Path(__file__).parents[2] / "launch" / "models"
FAMILIES = {"gdn": MODELS / "tiny-gdn", "mamba2": MODELS / "tiny-mamba2"}
MEMORY, FRACTION = 0.125, 0.75  # GiB
NODES = 4
NEWEST = "0.5.23"
"""The SGLang that README's table is of."""
WAYS = {"no speculation": "off", "SGLang's verify": "off", "slots": "slots", "replay": "replay"}

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="forks CPU engines")


def weights(model: Path) -> float:
    return (model / "model.safetensors").stat().st_size / arithmetic.GIB


def told(output: str, mark: str) -> dict:
    (line,) = [line for line in output.splitlines() if line.startswith(mark)]
    return json.loads(line.removeprefix(mark))


@pytest.fixture(scope="module")
def advice(forked):
    """``advice(family)`` is what the command says, by way of serving; asked once a family and strategy."""
    cache: dict[tuple[str, ...], dict] = {}

    def ask(family: str, strategy: str = "extra_buffer", *flags: str) -> dict:
        if (family, strategy, *flags) not in cache:
            argv = ["--model-path", str(FAMILIES[family]), "--gpu-memory", str(MEMORY), "--dtype", "float32", "--json"]
            argv += ["--mem-fraction-static", str(FRACTION), "--radix-strategy", strategy]
            argv += ["--max-running-requests", "64", *flags]

            def body():
                options = advise.parser().parse_args(argv)
                found = arithmetic.advise(options)
                print("advice:", json.dumps(advise.asdict(found) | {"text": advise.text(found, options)}))

            result = forked(body, **{CONV_DTYPE: "float32"})
            assert result.code == 0, result.output
            cache[family, strategy, *flags] = told(result.output, "advice: ")
        return cache[family, strategy, *flags]

    return ask


def serve(model: Path, way: str, radix: str | None = "extra_buffer", **draft) -> dict:
    """Slots, requests and tokens of a scheduler that finds `MEMORY` GiB, less its weights; ``draft``: fields of its
    `EngineSpec`."""
    from sglang.srt.mem_cache import kv_cache_configurator as module
    from sglang.srt.plugins import load_plugins

    from sglang_mamba_mtp.cpu import defaults
    from tests.engine.child import build_scheduler
    from tests.engine.spec import EngineSpec

    by_hand = ("max_total_tokens", "max_mamba_cache_size")
    defaults.DEFAULTS = tuple(default for default in defaults.DEFAULTS if default.name not in by_hand)
    profile = module.KVCacheConfigurator._profile_available_bytes
    left = MEMORY - weights(model)
    module.get_available_gpu_memory = lambda *args, **kwargs: left
    module.KVCacheConfigurator._profile_available_bytes = lambda self, before: profile(self, MEMORY)
    load_plugins()
    spec = EngineSpec(
        model=str(model),
        **({"spec": None if way == "no speculation" else "NEXTN", "steps": NODES - 1, "draft_tokens": NODES} | draft),
        radix=radix,
        overlap=radix != "no_buffer",
        max_running_requests=64,
        extra={
            **dict.fromkeys(by_hand),
            "mem_fraction_static": FRACTION,
            "mamba_track_interval": 256,
            "chunked_prefill_size": 256,
        },
    )
    scheduler = build_scheduler(spec)
    return {
        "slots": scheduler.req_to_token_pool.mamba_pool.size,
        "requests": scheduler.max_running_requests,
        "tokens": scheduler.max_total_num_tokens,
    }


QUICK = {
    ("gdn", "replay", "no_buffer"),
    ("mamba2", "slots", "extra_buffer_lazy"),
    ("gdn", "no speculation", "no_buffer"),
    ("mamba2", "SGLang's verify", "none"),
}
"""Of the strategies that are not SGLang's choice."""


def _cells() -> list:
    cells = [
        (family, way, strategy)
        for family in FAMILIES
        for way in WAYS
        for strategy in ("extra_buffer", "no_buffer", "extra_buffer_lazy", "none")
    ]
    quick = {cell for cell in cells if cell[2] == "extra_buffer"} | QUICK
    return [pytest.param(*cell, marks=() if cell in quick else pytest.mark.slow) for cell in cells]


@pytest.mark.in_turn
@pytest.mark.parametrize("family, way, strategy", _cells())
def test_a_server_has_what_was_advised(forked, advice, family, way, strategy):
    radix = None if strategy == "none" else strategy
    result = forked(
        lambda: print("served:", json.dumps(serve(FAMILIES[family], way, radix))),
        SGLANG_MAMBA_MTP_MODE=WAYS[way],
        **{CONV_DTYPE: "float32"},
    )
    (row,) = [row for row in advice(family, strategy)["rows"] if row["way"] == way]
    if row["why"]:  # without a radix cache SGLang has slots for as many requests as are asked for, or ends
        assert strategy == "none" and "nothing is left for the KV cache" in row["why"]
        assert result.code != 0 and "memory" in result.output.strip().splitlines()[-1]
        return
    assert result.code == 0, result.output[-3000:]
    served = told(result.output, "served: ")
    assert served == {name: row[name] for name in served}
    assert row["requests"] > 1


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rewinding_server_has_what_was_advised(forked, advice, family):
    result = forked(
        lambda: print("served:", json.dumps(serve(FAMILIES[family], "replay", radix="auto"))),
        SGLANG_MAMBA_MTP_RADIX="rewind",
        **{CONV_DTYPE: "float32"},
    )
    assert result.code == 0, result.output[-3000:]
    (row,) = advice(family, "rewind")["rows"]
    assert told(result.output, "served: ") == {name: row[name] for name in ("slots", "requests", "tokens")}
    (tracked,) = [row for row in advice(family)["rows"] if row["way"] == "replay"]
    assert row["requests"] > 1.8 * tracked["requests"]
    assert "radix" not in advice(family, "rewind")["launch"], "it is what replay does"


def test_with_a_host_tier_a_rewinding_request_has_three_slots(advice):
    flag = "--enable-hierarchical-cache"
    found = advice("gdn", "rewind", flag)
    (row,) = found["rows"]
    assert row["requests"] == row["slots"] // 3
    assert flag in found["launch"] and flag not in advice("gdn", "rewind")["launch"]


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["SGLang's verify", "slots", "replay"])
def test_a_server_that_drafts_blocks_has_what_was_advised(forked, tmp_path, way):
    """The draft's layers have keys and values of their own, and every node of a block counts."""
    model, draft = models.write_qwen3_next(tmp_path / "gdn"), draft_models.write_dflash(tmp_path / "draft")
    block = {"spec": "DFLASH", "draft_model": str(draft), "steps": 1, "draft_tokens": draft_models.BLOCK}
    argv = ["--model-path", str(model), "--gpu-memory", str(MEMORY), "--dtype", "float32", "--radix-strategy"]
    argv += ["extra_buffer", "--mem-fraction-static", str(FRACTION), "--max-running-requests", "64"]
    argv += ["--algorithm", "DFLASH", "--draft-model-path", str(draft), "--draft-nodes", str(draft_models.BLOCK)]

    def advised():
        print("advice:", json.dumps(advise.asdict(arithmetic.advise(advise.parser().parse_args(argv)))))

    asked = forked(advised, **{CONV_DTYPE: "float32"})
    assert asked.code == 0, asked.output
    advice = told(asked.output, "advice: ")
    served = forked(
        lambda: print("served:", json.dumps(serve(model, way, **block))),
        SGLANG_MAMBA_MTP_MODE=WAYS[way],
        **{CONV_DTYPE: "float32"},
    )
    assert served.code == 0, served.output[-3000:]
    (row,) = [row for row in advice["rows"] if row["way"] == way]
    assert told(served.output, "served: ") == {name: row[name] for name in ("slots", "requests", "tokens")}
    line = advice["launch"]
    assert (
        f"--speculative-algorithm DFLASH --speculative-num-draft-tokens 16 --speculative-draft-model-path {draft}"
        in line
    )
    assert "steps" not in line and "topk" not in line, "they are SGLang's"


def test_what_the_ways_cost(advice):
    """Replay holds least of all that speculate, so it has the most requests; the line to launch is a server's."""
    told = advice("gdn")
    rows = {row["way"]: row for row in told["rows"]}
    assert told["weights_from"] == "the model's files" and told["family"] == "GDN"
    speculating = [rows[way] for way in ("replay", "slots", "SGLang's verify")]
    assert min(speculating, key=lambda row: row["request_bytes"]) is rows["replay"]
    assert max(speculating, key=lambda row: row["requests"]) is rows["replay"]
    assert rows["slots"]["request_bytes"] == rows["no speculation"]["request_bytes"] + (NODES - 1) * told["slot_bytes"]
    assert rows["no speculation"]["break_even"] is None
    assert rows["slots"]["slots"] > rows["SGLang's verify"]["slots"]
    assert rows["replay"]["break_even"] < rows["slots"]["break_even"] < rows["SGLang's verify"]["break_even"]
    launch = told["launch"].split()
    assert launch[launch.index("--max-running-requests") + 1] == str(rows["replay"]["requests"])
    assert "--mamba-radix-cache-strategy extra_buffer" in told["launch"]
    (line,) = [line for line in told["text"].splitlines() if line.startswith("extra_buffer") and "replay" in line]
    assert line.split()[2:4] == [str(rows["replay"]["slots"]), str(rows["replay"]["requests"])]
    assert told["text"].endswith(told["launch"])


def test_room_is_left_for_graphs_and_drafts(forked):
    """Trees of many requests take more beside the pools than is usually left; nobody need try that out."""
    shape = MODELS.with_name("shapes") / "nemotron-nano-9b-v2"
    tree = ["--draft-nodes", "8", "--draft-steps", "3", "--topk", "4", "--radix-strategy", "rewind"]

    def advised(*fraction: str) -> dict:
        argv = ["--model-path", str(shape), "--gpu-memory", "139.8", *tree, *fraction]
        options = advise.parser().parse_args(argv)
        found = arithmetic.advise(options)
        return {**advise.asdict(found), "beside": found.launched.beside, "text": advise.text(found, options)}

    def asked() -> None:
        free = advised()
        more = advised("--mem-fraction-static", str(round(free["fraction"] + 0.01, 2)))
        print("advice:", json.dumps([free, more]))

    result = forked(asked)
    assert result.code == 0, result.output[-3000:]
    free, more = told(result.output, "advice: ")
    assert 0.8 <= free["fraction"] < arithmetic.FRACTION
    assert f"--mem-fraction-static {free['fraction']:g} " in free["launch"]
    for found, enough in ((free, True), (more, False)):
        left = 139.8 * (1 - found["fraction"]) * 2**30
        assert (found["beside"] <= left) is enough
        assert ("too little" in found["text"]) is not enough
    row = free["launched"]
    assert row["draft_bytes"] == row["tokens"] * 2 * 8 * 128 * 2, (
        "keys and values of one layer, 8 heads of 128, 16 bits"
    )
    assert more["launched"]["requests"] >= row["requests"]


def test_the_line_to_launch_is_one_command(advice):
    """It is there to be pasted into a shell, and a model's path may come from somewhere else."""
    path = "models/a model; touch $(here) `there`"
    options = advise.parser().parse_args(["--model-path", path, "--gpu-memory", "80", "--dtype", "float32;x"])
    line = arithmetic._launch_line(options, arithmetic.Row("replay", "extra_buffer", requests=7), 0.85)
    words = shlex.split(line)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", path]
    assert words[words.index("--dtype") + 1] == "float32;x"
    assert shlex.join(words) == line
    told = advice("gdn")["launch"]
    assert shlex.join(shlex.split(told)) == told and "'" not in told, "nothing to quote in an ordinary one"


def test_refusals(forked, tmp_path):
    """Without a traceback, naming what was typed."""
    (tmp_path / "dense").mkdir()
    dense = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (tmp_path / "dense" / "config.json").write_text(json.dumps(dense))
    cases = {
        (str(tmp_path / "dense"), "80"): "no model this plugin serves (dense)",
        (str(tmp_path), "80"): "there is no config.json",
        (str(FAMILIES["gdn"]), "0.001"): "do not fit",
    }
    for (model, memory), words in cases.items():
        result = forked(lambda m=model, g=memory: advise_main("--model-path", m, "--gpu-memory", g))
        assert result.code == 1 and words in result.output and "Traceback" not in result.output, result.output


def advise_main(*argv: str) -> None:
    raise SystemExit(advise.main(argv))


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--gpu-memory", "-1", "-1: expected a number above 0"),
        ("--gpu-memory", "abc", "abc: expected a number above 0"),
        ("--weights", "nan", "nan: expected a number above 0"),
        ("--tp", "0", "0: expected a whole number of 1 or more"),
        ("--draft-nodes", "1", "1: expected a whole number of 2 or more"),
        ("--window", "-3", "-3: expected a whole number of 0 or more"),
        ("--mem-fraction-static", "1.5", "1.5: expected a number above 0 and below 1"),
        ("--gpu", "RTX4090", "RTX4090: expected one of B200, H200, "),
    ],
)
def test_a_bad_value_is_a_usage_error(capsys, flag, value, expected):
    argv = ["--model-path", "m", "--gpu-memory", "80", f"{flag}={value}"]
    with pytest.raises(SystemExit) as stop:
        advise.parser().parse_args(argv)
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"argument {flag}: {expected}" in told


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--draft-nodes 65", ["--draft-nodes 65", "64 or fewer"]),
        ("--draft-nodes 8 --draft-steps 3", ["--draft-steps 3", "in 7", "--topk"]),
        ("--mode slots --window 8", ["--window 8", "no effect in mode slots"]),
        ("--mode slots --radix-strategy rewind", ["--radix-strategy rewind", "replay alone"]),
        ("--window 300", ["--window 300", "256 at most"]),
        ("--tp 3", ["--tp 3", "16 attention heads"]),
    ],
)
def test_what_a_server_is_refused_with_is_no_advice(forked, argv, words):
    shape = MODELS.with_name("shapes") / "qwen3-next-80b"
    result = forked(lambda: advise_main("--model-path", str(shape), "--gpu-memory", "140", *argv.split()))
    assert result.code == 1 and "Traceback" not in result.output, result.output
    assert all(word in result.output for word in words), result.output


def test_a_model_without_a_radix_strategy_of_sglangs_choice(forked, sglang):
    """Qwen3.5's class for text alone: 0.5.17 has to be given one, and then no request is rewound."""
    shape = MODELS.with_name("shapes") / "qwen3.5-35b-a3b"
    result = forked(lambda: advise_main("--model-path", str(shape), "--gpu-memory", "140", "--mode", "replay"))
    assert result.code == 0, result.output[-3000:]
    (launch,) = [line for line in result.output.splitlines() if "sglang.launch_server" in line]
    assert ("--mamba-radix-cache-strategy" in launch) == (sglang == "0.5.17"), launch
    assert ("a server that is given one rewinds nothing" in result.output) == (sglang == "0.5.17"), result.output


def test_a_gpu_may_be_said_in_full():
    options = advise.parser().parse_args(["--model-path", "m", "--gpu-memory", "80", "--gpu", "NVIDIA H200"])
    assert options.gpu == "NVIDIA H200"


def test_sglangs_flag_is_asked_for_as_many_requests_as_run(forked, sglang):
    """Of a version that holds its records for all requests asked for, too, without a word on how many these are.
    README's table has the newest one's numbers."""
    shape = MODELS.with_name("shapes") / "qwen3-next-80b"
    argv = ["--model-path", str(shape), "--gpu-memory", "140", "--tp", "2"]

    def asked() -> None:
        found = arithmetic.advise(advise.parser().parse_args(argv))
        one_more = ["--radix-strategy", "extra_buffer", "--max-running-requests", str(_requests_of_the_flag(found) + 1)]
        more = arithmetic.advise(advise.parser().parse_args([*argv, *one_more]))
        print("advice:", json.dumps([advise.asdict(found), _requests_of_the_flag(more)]))

    result = forked(asked)
    assert result.code == 0, result.output[-3000:]
    found, with_one_more = told(result.output, "advice: ")
    rows = {row["way"]: row for row in found["rows"] if row["strategy"] == "extra_buffer"}
    flag = rows["ReplaySSM flag"]
    assert not flag["why"]
    assert rows["SGLang's verify"]["requests"] < flag["requests"] < rows["no speculation"]["requests"]
    assert with_one_more <= flag["requests"]

    if sglang != NEWEST:
        return
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    strategies = ["rewind", "extra_buffer", "extra_buffer_lazy", "no_buffer"]  # its columns
    for way in rows:
        start = {"ReplaySSM flag": "SGLang's ReplaySSM flag", "replay": "`replay`", "slots": "`slots`"}.get(way, way)
        (line,) = re.findall(rf"^\| {re.escape(start)} \|(.* \(5\) \|.*)\|$", readme, re.MULTILINE)
        cells = [re.sub(r"\*|\(\d\)", "", cell).strip() for cell in line.split("|")]
        told_here = {
            row["strategy"]: str(row["requests"]) for row in found["rows"] if row["way"] == way and not row["why"]
        }
        assert cells == [told_here.get(name, "") for name in strategies], f"README's table of requests, {way}"


def _requests_of_the_flag(advice: arithmetic.Advice) -> int:
    (row,) = [row for row in advice.rows if (row.way, row.strategy) == ("ReplaySSM flag", "extra_buffer")]
    return row.requests
