"""Which of SGLang's own checks of a server (`sglang.test.kits`, in its wheel) run here, and why the others do not.

`RUNS` names what `test_few_shot_gsm8k.py` runs by name against its servers, `OF_THEIR_OWN` what has a server started
for it, `ELSEWHERE` what runs in a form of its own, `NOT` the rest with the reason. A test compares all of it with the
wheel, so that nothing new is missed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests


@dataclass(frozen=True)
class Runs:
    """Tests of one kit.

    ``attributes`` are the kit's own settings; ``marks`` pytest's: ``slow``, ``once``. ``flags`` and ``environment``:
    what the server has to be started with.
    """

    kit: str
    tests: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[pytest.MarkDecorator, ...] = ()
    flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


GPU = os.path.exists("/dev/nvidiactl")
HIDDEN_STATES = "--enable-return-hidden-states"

GRAMMARS = ("email", "greeting", "number", "phone", "date", "hex_color", "custom_log_format")
ANTHROPIC = (
    "test_content_blocks_message",
    "test_count_tokens",
    "test_count_tokens_with_system",
    "test_error_empty_messages",
    "test_error_invalid_max_tokens",
    "test_error_missing_content_type",
    "test_in_messages_system_role",
    "test_max_tokens",
    "test_multi_turn_messages",
    "test_raw_http_non_streaming",
    "test_raw_http_streaming",
    "test_simple_messages",
    "test_simple_messages_stream",
    "test_stop_sequences",
    "test_stream_multi_turn",
    "test_stream_with_system",
    "test_system_message_blocks",
    "test_system_message_string",
    "test_temperature",
    "test_tool_result_image_content_conversion",
    "test_top_p_and_top_k",
)
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

DELTA = 0.5 if GPU else 1e-3
"""Between log-probabilities of decoding and of prefilling: SGLang's for 16 bits, as models are served on a GPU."""

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
        "basic_scheduler_stress_kit.BasicSchedulerStressMixin",
        ("test_streaming_response", "test_concurrent_requests"),
        {"sanity_max_new_tokens_short": 96},
    ),
    Runs("basic_scheduler_stress_kit.BasicSchedulerStressMixin", ("test_long_prompt",), marks=ONCE),
    Runs(
        "abort_timeout_kit.AbortAllMixin",
        ("test_abort_all",),
        {"abort_all_num_requests": 20, "abort_all_max_new_tokens": 4000, "abort_all_sleep": 1 if GPU else 5},
    ),
    Runs("matched_stop_kit.MatchedStopMixin", ("test_finish_stop_str", "test_finish_length")),
    Runs(
        "ebnf_constrained_kit.EBNFConstrainedMixin",
        (*(f"test_ebnf_generate_{name}" for name in GRAMMARS), "test_ebnf_generate_all_optional_function_params"),
    ),
    Runs(
        "regex_constrained_kit.RegexConstrainedMixin",
        tuple(f"test_regex_generate_{name}" for name in GRAMMARS),
    ),
    Runs(
        "json_constrained_kit.JSONConstrainedMixin",
        ("test_json_generate", "test_json_invalid", "test_json_openai"),
        {"json_schema": SCHEMA},
    ),
    Runs(
        "json_constrained_kit.JSONConstrainedMixin",
        ("test_mix_json_and_other",),
        {"json_schema": SCHEMA},
        ONCE,
    ),
    Runs("json_mode_kit.JSONModeMixin", ("test_json_mode_response", "test_json_mode_with_streaming")),
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
    Runs("spec_server_kits.SpecCorrectnessKit", ("test_eos_token",), marks=SLOW),
    Runs("spec_server_kits.SpecLogprobKit", ("test_logprob_start_len", "test_token_ids_logprob_ragged")),
    # the same by two names
    Runs(
        "spec_server_kits.SpecLogprobKit",
        ("test_logprob_decode_match_prefill", "test_logprob_spec_v2_match"),
        {"logprob_match_delta": DELTA},
    ),
    # 512 tokens
    Runs("spec_server_kits.SpecLogprobKit", ("test_logprob_match",), {"logprob_match_delta": DELTA}, ONCE),
    Runs("spec_server_kits.SpecLogprobKit", ("test_logprob_mixed",), marks=SLOW),  # 112 prompts
    Runs("spec_server_kits.SpecPenaltyKit", ("test_penalty_mixed",)),
    Runs(
        "spec_server_kits.SpecGrammarKit",
        (
            "test_grammar_structured_output_no_trailing_tokens",
            "test_grammar_logprob_count_matches_completion_tokens",
        ),
        {"grammar_json_schema": SCHEMA},
    ),
    Runs("spec_server_kits.SpecFeatureKit", ("test_request_abort",), marks=SLOW),
    Runs("anthropic_messages_kit.AnthropicMessagesMixin", ANTHROPIC, {"api_key": "none"}),
    Runs("spec_server_kits.SpecHiddenStatesKit", ("test_return_hidden_states",), flags=HIDDEN_STATES),
)

OF_THEIR_OWN = (
    Runs(
        "abort_timeout_kit.WaitingTimeoutMixin",
        ("test_waiting_timeout",),
        {"waiting_timeout_max_new_tokens": 4000 if GPU else 600},  # takes longer than the other one waits
        flags="--max-running-requests 1",
        environment={"SGLANG_REQ_WAITING_TIMEOUT": "0.5"},
    ),
    Runs(
        "abort_timeout_kit.RunningTimeoutTwoWaveMixin",
        ("test_running_timeout_no_crash",),
        {"running_timeout_max_new_tokens": 6000, "running_timeout_sleep": 1},
        environment={"SGLANG_REQ_RUNNING_TIMEOUT": "2"},
    ),
)
"""What a server is started for, so all of it is slow."""

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
    "matched_stop_kit.MatchedStopMixin.test_finish_stop_regex_str": "a tiny model's chat ends before an 'and' or 'or'",
    "matched_stop_kit.MatchedStopMixin.test_finish_stop_eos": "Llama's end, of a text the tiny models do not end",
    "ebnf_constrained_kit.EBNFConstrainedMixin.test_ebnf_generate_complex_json": BLANKS,
    "regex_constrained_kit.RegexConstrainedMixin.test_regex_generate_complex_json": BLANKS,
    "spec_server_kits.SpecSamplingMaskKit": "SGLang refuses it with speculation: return_sampling_mask is not supported",
    "spec_server_kits.SpecFeatureKit.test_constrained_decoding": "strings without a bound, which tiny-mamba2 does not "
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
    longer = [name for name in (*run(), *ELSEWHERE, *NOT) if test == name or test.startswith(f"{name}.")]
    return sorted(longer, key=len, reverse=True)


def run() -> list[str]:
    """The tests that run by their names, "module.class.test"."""
    return [f"{runs.kit}.{name}" for runs in (*RUNS, *OF_THEIR_OWN) for name in runs.tests]


def cases() -> list[Any]:
    """`RUNS` as pytest parameters (runs, test), as far as the installed SGLang has them."""
    there = set(in_the_wheel())
    return [
        pytest.param(runs, name, id=f"{runs.kit.partition('.')[2]}-{name}", marks=runs.marks)
        for runs in RUNS
        for name in runs.tests
        if f"{runs.kit}.{name}" in there
    ]


def masks() -> str:
    """Flags with which SGLang can apply a grammar's mask: its default does not on a CPU in 0.5.17."""
    backend = _sglang() / "srt" / "constrained" / "xgrammar_backend.py"
    if GPU or 'logits.device.type == "cpu"' in backend.read_text():
        return ""
    return "--grammar-backend llguidance"


class _Requests:
    """`requests` for a kit: what it asks, in what the model has.

    A token past the vocabulary is another. A pause is answered as it is sent on: what a step ends meanwhile is no
    answer of later.
    """

    def __init__(self, vocabulary: int) -> None:
        """``vocabulary``: how many tokens the model has, those included that its tokenizer has not."""
        self._vocabulary = vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(requests, name)

    def post(self, url: str, **options: Any) -> Any:
        body = options.get("json") or {}
        for name in {"input_ids", "token_ids_logprob"} & body.keys():
            if body[name] and isinstance(body[name][0], int):
                body[name] = [token if token < self._vocabulary else 10 + token % 600 for token in body[name]]
        answer = requests.post(url, **options)
        base, _, route = url.rpartition("/")
        if route == "pause_generation":  # a scheduler answers this in its next turn, with nothing at work
            requests.get(f"{base}/server_info", timeout=60).raise_for_status()
        return answer


PROBLEMS = Path(__file__).parents[1] / "launch" / "models" / "data" / "test.jsonl"
SENTENCE, SENTENCES = "the quick brown fox jumps over the lazy dog. ", 180
"""What a long prompt is full of: 28 tokens, and how often they fit into the context and are two chunks of a prefill."""


class _Problems(_Requests):
    """For the kit that asks for capitals: a country stands for a problem, its city for the right answer to that."""

    def __init__(self, vocabulary: int, cities: Mapping[str, str]) -> None:
        """``cities`` by what the kit asks."""
        super().__init__(vocabulary)
        found: dict[str, str] = {}  # by their answers, so that no two have the same
        for line in PROBLEMS.read_text().splitlines():
            problem = json.loads(line)
            found.setdefault(problem["answer"].partition("#### ")[2], f"Question: {problem['question']}\nAnswer:")
        self._asked = [
            (asked, problem, right, city)
            for (asked, city), (right, problem) in zip(cities.items(), found.items(), strict=False)
        ]

    def post(self, url: str, **options: Any) -> Any:
        body = options["json"]
        ((asked, problem, right, city),) = [entry for entry in self._asked if body["text"].endswith(entry[0])]
        text = body["text"].removesuffix(asked).replace(SENTENCE * 800, SENTENCE * SENTENCES)
        options["json"] = body | {"text": text + problem}
        return _Translated(super().post(url, **options), right, city)


class _Translated:
    """A response in which the right answer is a word. What a model goes on with after its answer is left out."""

    def __init__(self, response: requests.Response, right: str, word: str) -> None:
        self._response, self._right, self._word = response, right, word

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def __enter__(self) -> _Translated:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def json(self) -> dict[str, Any]:
        return self._translate(self._response.json())

    def iter_lines(self, **options: Any) -> Iterator[str]:
        for line in self._response.iter_lines(**options):
            said = line.removeprefix("data: ")
            yield line if said in ("", "[DONE]") else f"data: {json.dumps(self._translate(json.loads(said)))}"

    def _translate(self, said: dict[str, Any]) -> dict[str, Any]:
        answer = said["text"].partition("\n\n")[0]
        return said | {"text": re.sub(rf"#### {self._right}$", self._word, answer)}


def _requests_for(module: ModuleType, tokens: int) -> _Requests:
    asked = getattr(module, "_CONCURRENT_QA", None)
    return _Requests(tokens) if asked is None else _Problems(tokens, dict(asked))


def vocabulary(model: str) -> int:
    """How many tokens a model, a folder or a name, puts out. Its tokenizer may have fewer: it draws the others too."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(model)
    return config.get("text_config", config)["vocab_size"]


def mixin(kit: str, model: str) -> type:
    """The kit's class, "module.class", for a server of ``model``.

    What SGLang's fixture of speculative servers does for a kit is added to it.
    """
    from sglang.test import test_utils
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase as Fixture

    name = kit.rpartition(".")[2]
    module = importlib.import_module(f"sglang.test.kits.{kit.partition('.')[0]}")
    tokens = vocabulary(model)
    module.requests = _requests_for(module, tokens)
    test_utils.requests = _Requests(tokens)
    kit_class = getattr(module, name)
    given = {name: vars(Fixture)[name] for name in ("send_request", "send_requests_abort", "run_decode")}
    return type(kit_class.__name__, (kit_class,), given)
