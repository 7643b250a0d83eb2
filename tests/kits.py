"""Which of SGLang's own checks of a server (`sglang.test.kits`, in its wheel) run here, and why the others do not.

`RUNS` names what `test_few_shot_gsm8k.py` runs by name against its servers, `ELSEWHERE` what runs in a form of its own,
`NOT` the rest with the reason. A test compares all of it with the wheel, so that nothing new is missed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests


@dataclass(frozen=True)
class Runs:
    """Tests of one kit.

    ``attributes`` are the kit's own settings; ``marks`` pytest's: ``slow``, ``once``. ``grammar``: it constrains what
    is said, which SGLang does not do on a CPU in every version.
    """

    kit: str
    tests: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[pytest.MarkDecorator, ...] = ()
    grammar: bool = False


GPU = os.path.exists("/dev/nvidiactl")

GRAMMARS = ("email", "greeting", "number", "phone", "date", "hex_color", "custom_log_format")
SLOW, ONCE = (pytest.mark.slow,), (pytest.mark.once,)


def _sglang() -> Path:
    """The installed SGLang's sources."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def _knows(setting: str) -> bool:
    """Whether the installed SGLang's kit that pauses has this setting."""
    return setting in (_sglang() / "test" / "kits" / "pause_generation_kit.py").read_text()


WORD = {"type": "string", "pattern": "^[A-Za-z]{1,8}$"}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": WORD,
            "population": {"type": "integer", "minimum": 0, "maximum": 9999},
            "country": WORD,
            "capital": WORD,
        },
        "required": ["name", "population", "country", "capital"],
        "additionalProperties": False,
    }
)
"""The kits' schema, its words and numbers bounded: a tiny model has no reason to end one."""

RUNS = (
    Runs(
        "basic_api_contract_kit.BasicAPIContractMixin",
        (
            "test_health",
            "test_health_generate",
            "test_get_server_info",
            "test_get_model_info",
            "test_openai_chat_completion",
            "test_openai_completion",
        ),
    ),
    Runs(
        "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin",
        ("test_ascii_ratio", "test_no_repetition_blowup", "test_determinism_temp_zero", "test_max_token_one"),
    ),
    Runs(
        "abort_timeout_kit.AbortAllMixin",
        ("test_abort_all",),
        {"abort_all_num_requests": 20, "abort_all_max_new_tokens": 4000, "abort_all_sleep": 1 if GPU else 5},
    ),
    Runs("matched_stop_kit.MatchedStopMixin", ("test_finish_stop_str", "test_finish_length")),
    Runs(
        "ebnf_constrained_kit.EBNFConstrainedMixin",
        (*(f"test_ebnf_generate_{name}" for name in GRAMMARS), "test_ebnf_generate_all_optional_function_params"),
        grammar=True,
    ),
    Runs(
        "regex_constrained_kit.RegexConstrainedMixin",
        tuple(f"test_regex_generate_{name}" for name in GRAMMARS),
        grammar=True,
    ),
    Runs(
        "json_constrained_kit.JSONConstrainedMixin",
        ("test_json_generate", "test_json_invalid", "test_json_openai"),
        {"json_schema": SCHEMA},
        grammar=True,
    ),
    Runs(
        "json_constrained_kit.JSONConstrainedMixin",
        ("test_mix_json_and_other",),
        {"json_schema": SCHEMA},
        ONCE,
        grammar=True,
    ),
    Runs("json_mode_kit.JSONModeMixin", ("test_json_mode_response", "test_json_mode_with_streaming"), grammar=True),
    Runs(
        "pause_generation_kit.PauseResumeInPlaceMixin",
        ("test_pause_resume_in_place",),
        {
            "pause_num_requests": 8,
            "pause_max_new_tokens": 4000 if GPU else 200,  # more than a second's
            "pause_duration": 1,
            "pause_ignore_eos": True,
        },
        (pytest.mark.skipif(GPU and not _knows("pause_ignore_eos"), reason="its answers end before it pauses"),),
    ),
    Runs(
        "spec_server_kits.SpecCorrectnessKit",
        ("test_batch_generation", "test_first_token_finish"),
        {"batch_accept_len_thres": 1.0},
    ),
    Runs("spec_server_kits.SpecCorrectnessKit", ("test_acc_length",), {"acc_length_thres": 1.0}, SLOW),
    Runs("spec_server_kits.SpecLogprobKit", ("test_logprob_start_len", "test_token_ids_logprob_ragged")),
    # 512 tokens; SGLang allows 0.5, in 16 bits, as models are served on a GPU
    Runs(
        "spec_server_kits.SpecLogprobKit",
        ("test_logprob_match",),
        {"logprob_match_delta": 0.5 if GPU else 1e-3},
        ONCE,
    ),
    Runs("spec_server_kits.SpecPenaltyKit", ("test_penalty_mixed",)),
    Runs(
        "spec_server_kits.SpecGrammarKit",
        (
            "test_grammar_structured_output_no_trailing_tokens",
            "test_grammar_logprob_count_matches_completion_tokens",
        ),
        {"grammar_json_schema": SCHEMA},
        grammar=True,
    ),
    Runs("spec_server_kits.SpecFeatureKit", ("test_request_abort",), marks=SLOW),
)

ELSEWHERE = {
    "cache_hit_kit": "test_cache_hits_of_conversations",
    "radix_cache_server_kit": "test_radix_attention",
    "prefix_cache_branching_kit": "test_prefix_cache_branching",
    "kl_divergence_kit": "test_kl_divergence_where_...: the helpers that need no data set from the network",
    "unified_radix_cache_kit": "the same helpers; its tokens are past the tiny vocabulary, its two passes HiCache's",
    "spec_server_kits.SpecFeatureKit.test_radix_attention": "test_radix_attention",
    "spec_server_kits.SpecParityKit": "tests/engine/test_equality.py: tokens and states, on every configuration",
    "spec_server_kits.SpecAccuracyKit": "test_few_shot_gsm8k",
    "eval_accuracy_kit.GSM8KMixin": "test_few_shot_gsm8k",
    "pd_parity_kit": "tests/disaggregation/test_servers.py: the kit itself, on a prefill and a decode server",
}
"""What stands for these kits, most of it in `test_few_shot_gsm8k.py`."""

KNOWS = "asks for knowledge that a tiny model of one kind of problem has not"
BLANKS = "a tiny model goes on with blanks, which the grammar allows, for longer than the answer may be"
DATA = "a data set or a model from the network"
SPEED = "a speed, on a GPU"

NOT = {
    "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin.test_capital_france": KNOWS,
    "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin.test_basic_math": KNOWS,
    "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin.test_color_completion": KNOWS,
    "basic_scheduler_stress_kit": f"{KNOWS}; 8,000 tokens of a context of 8,192; tests/engine/test_stress.py",
    "matched_stop_kit.MatchedStopMixin.test_finish_stop_regex_str": "a tiny model says neither 'and' nor 'or'",
    "matched_stop_kit.MatchedStopMixin.test_finish_stop_eos": "the ends of Llama's texts",
    "ebnf_constrained_kit.EBNFConstrainedMixin.test_ebnf_generate_complex_json": BLANKS,
    "regex_constrained_kit.RegexConstrainedMixin.test_regex_generate_complex_json": BLANKS,
    "abort_timeout_kit.WaitingTimeoutMixin": "a server that takes one request at a time, and a queue that is SGLang's",
    "abort_timeout_kit.RunningTimeoutTwoWaveMixin": "a server that gives requests up after a time",
    "spec_server_kits.SpecCorrectnessKit.test_eos_token": "hopes that a sampled text ends by itself",
    "spec_server_kits.SpecLogprobKit.test_logprob_mixed": "prompts of 2,000 ids in order, past the tiny vocabulary",
    "spec_server_kits.SpecLogprobKit.test_logprob_decode_match_prefill": "id 1000, past the tiny vocabulary",
    "spec_server_kits.SpecLogprobKit.test_logprob_spec_v2_match": "id 1000, past the tiny vocabulary",
    "spec_server_kits.SpecHiddenStatesKit": "a server that returns hidden states, which the plugin has no part in",
    "spec_server_kits.SpecSamplingMaskKit": "samples a verify, which SGLang does not do on a CPU",
    "spec_server_kits.SpecFeatureKit.test_constrained_decoding": "strings without a bound, which a tiny model does not "
    "end; json_constrained_kit with a bounded schema",
    "spec_server_kits.SpecPerfKit": SPEED,
    "spec_decoding_kit": SPEED,
    "fwd_occupancy_kit": SPEED,
    "perf_bench_kit": SPEED,
    "vlm_perf_kit": SPEED,
    "eval_accuracy_kit": DATA,
    "lm_eval_kit": DATA,
    "hellaswag_kit": DATA,
    "mmmu_vlm_kit": DATA,
    "reasoning_kit": "a model that thinks before it answers",
    "streaming_session_kit": "declined with its reason, see docs/compatibility.md",
    "anthropic_messages_kit": "another protocol before the same requests",
    "dsa_metadata_kit": "another kind of attention",
    "attention_unittest": "no server: SGLang's attention backends as units, on a GPU",
    "unified_radix_cache": "no server: SGLang's radix tree as a unit",
}


def in_the_wheel() -> Iterator[str]:
    """Every test of the installed SGLang's kits, "module.class.test"; a module that has functions only by its name.

    Read from the sources: importing a kit imports SGLang.
    """
    folder = _sglang() / "test" / "kits"
    for path in sorted(folder.glob("*.py")):
        kits = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        tests = [
            f"{path.stem}.{kit.name}.{part.name}"
            for kit in kits
            for part in kit.body
            if isinstance(part, ast.FunctionDef) and part.name.startswith("test")
        ]
        yield from tests or [path.stem]
    yield from (path.name for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "__pycache__")


def named(test: str) -> list[str]:
    """The entries that name this test, its kit or its module, the one that says most first."""
    runs = [f"{runs.kit}.{name}" for runs in RUNS for name in runs.tests]
    longer = [name for name in (*runs, *ELSEWHERE, *NOT) if test == name or test.startswith(f"{name}.")]
    return sorted(longer, key=len, reverse=True)


def cases() -> list[Any]:
    """`RUNS` as pytest parameters (kit, test, attributes), as far as the installed SGLang has them."""
    there, grammars = set(in_the_wheel()), _masks_here()
    return [
        pytest.param(runs.kit, name, runs.attributes, id=f"{runs.kit.partition('.')[2]}-{name}", marks=runs.marks)
        for runs in RUNS
        for name in runs.tests
        if f"{runs.kit}.{name}" in there and (grammars or not runs.grammar)
    ]


def _masks_here() -> bool:
    """Whether SGLang can apply a grammar's mask: 0.5.17 raises on a CPU. (Our own grammar in tests/engine can.)"""
    if GPU:
        return True
    backend = _sglang() / "srt" / "constrained" / "xgrammar_backend.py"
    return 'logits.device.type == "cpu"' in backend.read_text()


class _Requests:
    """`requests` for a kit. A pause is answered as it is sent on: what a step ends meanwhile is no answer of later."""

    def __getattr__(self, name: str) -> Any:
        return getattr(requests, name)

    @staticmethod
    def post(url: str, **options: Any) -> requests.Response:
        answer = requests.post(url, **options)
        base, _, route = url.rpartition("/")
        if route == "pause_generation":  # a scheduler answers this in its next turn, with nothing at work
            requests.get(f"{base}/server_info", timeout=60).raise_for_status()
        return answer


def mixin(kit: str) -> type:
    """The kit's class, "module.class"; what SGLang's fixture of speculative servers does for a kit is added to it."""
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase as Fixture

    name = kit.rpartition(".")[2]
    module = importlib.import_module(f"sglang.test.kits.{kit.partition('.')[0]}")
    module.requests = _Requests()
    kit_class = getattr(module, name)
    given = {name: vars(Fixture)[name] for name in ("send_request", "send_requests_abort", "run_decode")}
    return type(kit_class.__name__, (kit_class,), given)
