"""SGLang's own checks of a running server with speculation: few-shot GSM8K, KL divergence, caching, the HTTP contract.

One server a configuration, started as SGLang's tests start theirs. By default the tiny models with a handful of
questions, float32 on a CPU; ``--slow`` runs every mode. Any other model by environment:

    TEST_GSM8K_MODEL=Qwen/Qwen3-Next-80B-A3B-Instruct TEST_GSM8K_ARGS="--tp 4" TEST_GSM8K_ACCURACY=0.93 \\
        python -m pytest tests/test_few_shot_gsm8k.py

TEST_GSM8K_ARGS      more flags of the server, which win over those here
TEST_GSM8K_RADIX     a radix cache strategy of SGLang's, for modes that do not rewind (extra_buffer)
TEST_GSM8K_DATA      GSM8K's test.jsonl (by default the tiny models' data)
TEST_GSM8K_QUESTIONS how many of its lines are asked, worked examples included
TEST_GSM8K_ACCURACY  the least share of right answers
TEST_GSM8K_KL        the largest mean KL divergence, in nats (by default SGLang's for chains)
TEST_GSM8K_RECORD    a file to which every figure is appended, a line of JSON each
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mtp_demo.server import free_port

from . import kits, reloads
from .clients import START, Client, wait_for
from .conftest import VERSIONS
from .kits import GPU
from .processes import sglang  # noqa: F401 - the environment before anything of SGLang

LAUNCH = Path(__file__).parents[1] / "launch"
FAMILIES = ("gdn", "mamba2")
SHOTS = 5

#: The largest mean KL divergence between decoding and prefilling that SGLang's tests of Qwen3-Next allow; float32 on a
#: CPU is held to less.
KL_CHAIN, KL_TREE = (0.0025, 0.008) if GPU else (1e-8, 1e-8)

NEXTN = "--speculative-algorithm NEXTN --speculative-num-steps 3"
CHAIN = f"{NEXTN} --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = f"{NEXTN} --speculative-eagle-topk 3 --speculative-num-draft-tokens 8"
NGRAM = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --speculative-ngram-max-bfs-breadth"


@dataclass(frozen=True)
class Case:
    """A server.

    flags: beside model, host and port. mode: the plugin's, None for its default. radix: SGLang's strategy; None leaves
    it to the mode, and replay rewinds. chunk: prefilling, and decoding under a strategy of SGLang's, cache the states
    of lengths that are multiples of it. kl: of decoding against prefilling, in nats, at most. accept_length: tokens a
    verify, at least. data: None for the tiny models'. environment: more of it.
    """

    model: str
    flags: str
    mode: str | None = None
    radix: str | None = None
    kl: float = KL_CHAIN
    chunk: int = 64
    accuracy: float = 0.9
    accept_length: float = 1.0
    questions: int = 12
    data: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def rewinds(self) -> bool:
        """Whether what was decoded is cached at its exact length."""
        return self.radix is None

    def arguments(self) -> list[str]:
        """Flags of the server, model, host and port aside."""
        cache = "" if self.rewinds else f"--mamba-radix-cache-strategy {self.radix} --mamba-track-interval {self.chunk}"
        mode = "" if self.mode is None else f"--mamba-mtp-mode {self.mode}"
        return shlex.split(f"--random-seed 0 {cache} {mode} {self.flags}")


def tiny(family: str, flags: str, mode: str | None = None, **fields: Any) -> Case:
    """A tiny model. The chunk of GDN is SGLang's, that of Mamba2 the model's, and made shorter here."""
    device = "--device cpu --dtype float32"
    if GPU:
        # Triton attention is refused for Nemotron-H, whose first layer is none.
        device = f"--attention-backend {'triton' if family == 'gdn' else 'flashinfer'} --disable-prefill-cuda-graph"
        device += " --sampling-backend pytorch --max-total-tokens 65536 --max-mamba-cache-size 96"
    device += f" --max-running-requests 16 --constrained-json-disable-any-whitespace {kits.masks()}"
    if family == "mamba2":
        device += """ --json-model-override-args '{"mamba_chunk_size":16}'"""
    fields.setdefault("accept_length", 2.5 if NEXTN in flags else 1.2)
    fields.setdefault("chunk", {"gdn": 64, "mamba2": 16}[family])
    return Case(str(LAUNCH / "models" / f"tiny-{family}"), f"{device} {flags}", mode, **fields)


def cases() -> list[Any]:
    """What is served, as parameters of `server`."""
    given = os.environ.get("TEST_GSM8K_MODEL")
    if given:
        data = os.environ.get("TEST_GSM8K_DATA")
        case = Case(
            given,
            f"{CHAIN} {os.environ.get('TEST_GSM8K_ARGS', '')}",
            radix=os.environ.get("TEST_GSM8K_RADIX"),
            kl=float(os.environ.get("TEST_GSM8K_KL", KL_CHAIN)),
            accuracy=float(os.environ.get("TEST_GSM8K_ACCURACY", 0.9)),
            questions=int(os.environ.get("TEST_GSM8K_QUESTIONS", 200)),
            data=Path(data) if data else None,
        )
        return [pytest.param(case, id=Path(given).name)]
    modes = {"rewind": ("replay", None)}
    modes |= {mode: (mode, "extra_buffer") for mode in ("replay", "slots", "snapshot", "off")}
    slow = {
        f"{family}-{shape}-{name}": tiny(family, flags, mode, kl=kl, questions=45, radix=radix)
        for family in FAMILIES
        for shape, flags, kl in (("chain", CHAIN, KL_CHAIN), ("tree", TREE, KL_TREE), ("ngram", f"{NGRAM} 4", KL_TREE))
        for name, (mode, radix) in modes.items()
    }
    in_turn = pytest.mark.in_turn("server")
    return [
        pytest.param(tiny("gdn", f"{CHAIN} {kits.HIDDEN_STATES}"), id="gdn-chain", marks=in_turn),
        pytest.param(tiny("mamba2", f"{TREE} {kits.HIDDEN_STATES}", kl=KL_TREE), id="mamba2-tree", marks=in_turn),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in slow.items()),
    ]


@dataclass(frozen=True)
class Served:
    """A server that answers at ``url``."""

    case: Case
    url: str
    process: Any

    def record(self, request: pytest.FixtureRequest, **figures: float) -> None:
        """Append ``figures`` of a test to TEST_GSM8K_RECORD, if that is asked for."""
        path = os.environ.get("TEST_GSM8K_RECORD")
        if path is None:
            return
        import torch

        line = {
            "test": request.node.name,
            **figures,
            "mode": self.case.mode or "default",
            "radix": self.case.radix or "rewind",
            "flags": self.case.arguments(),
            "device": torch.cuda.get_device_name() if GPU else "cpu",
            **{name: importlib.metadata.version(name) for name in ("sglang", "sglang-mamba-mtp", "torch", "triton")},
            "commit": os.environ.get("BENCH_COMMIT")
            or subprocess.run(
                ["git", "-C", LAUNCH, "describe", "--always", "--dirty"], capture_output=True, text=True
            ).stdout.strip(),
        }
        with open(path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def go_on(self) -> None:
        """End a pause, if there is one."""
        import requests

        if self.process.poll() is None:
            requests.post(f"{self.url}/continue_generation", json={}, timeout=60).raise_for_status()

    def kit(self, mixin: type, **attributes: Any) -> Any:
        """An instance of one of SGLang's kits, which are mixins of `unittest.TestCase`, over this server."""
        told = {"base_url": self.url, "model": self.case.model, "process": self.process}
        return type(mixin.__name__, (mixin, unittest.TestCase), told | attributes)()


@pytest.fixture(scope="module", params=cases())
def server(request, sglang):  # noqa: F811
    """`Served`, one start for all tests of a configuration. What it prints is what the test prints."""
    from sglang.srt.utils import kill_process_tree
    from sglang.test.test_utils import popen_launch_server

    case = request.param
    url = f"http://127.0.0.1:{free_port()}"
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **case.environment}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SGLANG_MAMBA_MTP")]:
            patch.delenv(name)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        process = popen_launch_server(
            case.model, url, timeout=START, other_args=case.arguments(), env=environment, device="given"
        )
        try:
            yield Served(case, url, process)
        finally:
            kill_process_tree(process.pid, wait_timeout=60)


# ----------------------------------------------------------------------------------------------------------- accuracy


def test_few_shot_gsm8k(server, tmp_path, request):
    """The share of right answers."""
    from sglang.test.few_shot_gsm8k import run_eval

    data = server.case.data
    if data is None:  # the benchmark takes its worked examples from the head of the file
        data = tmp_path / "questions.jsonl"
        data.write_text("\n".join(lines("train")[:SHOTS] + lines("test")) + "\n")
    arguments = SimpleNamespace(
        data_path=str(data),
        num_questions=server.case.questions,
        num_shots=SHOTS,
        max_new_tokens=160 if server.case.data is None else 512,
        parallel=8,
        host="127.0.0.1",
        port=server.port,
        temperature=0.0,
    )
    with contextlib.chdir(tmp_path):  # it leaves its transcript there
        metrics = run_eval(arguments)
    server.record(request, accuracy=float(metrics["accuracy"]), questions=server.case.questions)
    assert metrics["accuracy"] >= server.case.accuracy, metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "server", [tiny(family, "", radix="extra_buffer", questions=45) for family in FAMILIES], indirect=True, ids=FAMILIES
)
def test_few_shot_gsm8k_without_speculation(server, tmp_path, request):
    """What the share of right answers is to be compared with."""
    test_few_shot_gsm8k(server, tmp_path, request)


def test_accept_length(server, request):
    """Drafts are accepted. (SGLang's average of a server is not told in every version.)"""
    import requests

    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    body = {"input_ids": prompts(server, 4, 200), "sampling_params": sampling}
    metas = [reply["meta_info"] for reply in requests.post(f"{server.url}/generate", json=body).json()]
    verifies = sum(meta["spec_verify_ct"] for meta in metas)
    assert verifies > 0
    accept_length = sum(meta["completion_tokens"] for meta in metas) / verifies
    server.record(request, accept_length=accept_length)
    assert accept_length >= server.case.accept_length


# ------------------------------------------------------------------------------------------ KL divergence, caches hit


def lines(name: str) -> list[str]:
    """The tiny models' ``train`` or ``test`` problems, GSM8K's JSON."""
    return (LAUNCH / "models" / "data" / f"{name}.jsonl").read_text().splitlines()


def prompts(server, count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens: worked examples, a different one first in each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(server.case.model)
    problems = [json.loads(line) for line in lines("train")]
    texts = [f"Question: {problem['question']}\nAnswer: {problem['answer']}\n\n" for problem in problems]
    found = [tokenizer.encode("".join(texts[first:])) for first in range(count)]
    assert all(len(tokens) >= length for tokens in found)
    return [tokens[:length] for tokens in found]


def suffixes(count: int, length: int, seed: int) -> list[list[int]]:
    """Random tokens of the tiny vocabulary: the model is unsure after them, so a wrong state shows in what it says."""
    choose = random.Random(seed)
    return [[choose.randrange(10, 700) for _ in range(length)] for _ in range(count)]


def asserts(server):
    """SGLang's checks of how many tokens came from the cache, after a prefill and after decoding.

    Under its strategies whole chunks. Decoding leaves its newest snapshot, which may lie in the accepted run past the
    last token asked for; the next turn goes on otherwise and would not find it. So all turns here end on a multiple of
    16, more than a tree before the next. Where states are rewound it is all but the last token.
    """
    from sglang.test.kl_multiturn_utils import make_mamba_decode_assert, make_mamba_prefill_assert

    chunk = 1 if server.case.rewinds else server.case.chunk
    return make_mamba_prefill_assert(chunk), make_mamba_decode_assert(chunk)


def divergence(check: Callable[[], None]) -> float:
    """Run one of SGLang's KL checks; returns the mean KL divergence that it prints, in nats."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            check()
    finally:
        print(printed.getvalue())
    return float(re.search(r"^avg_kl_div=(\S+)$", printed.getvalue(), re.MULTILINE)[1])


def test_kl_divergence_where_a_prefill_is_cached(server, request):
    """Two branches of two cached prompts, then a second turn: log-probabilities of decoding and of one prefill of all.

    At temperature 1. (Without SGLang's sampling kernel, so on a CPU, verify is greedy whatever the temperature; the
    log-probabilities are compared all the same.)
    """
    from sglang.test.kl_multiturn_utils import test_input_output_logprobs_match_prefill_cache_hit_helper as check

    prefixes = [prompt for prompt in prompts(server, 2, 2 * server.case.chunk + 20) for _ in range(2)]
    prefilled, decoded = asserts(server)
    run = functools.partial(
        check,
        server.url,
        server.case.model,
        server.case.kl,
        prefix_input_ids=prefixes,
        full_input_ids=[prefix + tail for prefix, tail in zip(prefixes, suffixes(4, 44, 1), strict=True)],
        turn_suffixes=[suffixes(4, 50, 2)],
        assert_prefill_cached_tokens=prefilled,
        assert_decode_cached_tokens=decoded,
        branches_per_group=2,
        max_new_tokens=48,
        replay_batch_size=4,
        sampling_temperature=1,
    )
    server.record(request, kl_divergence=divergence(run))


def test_kl_divergence_where_decoding_is_cached(server, request):
    """The same where what is cached was decoded: two further turns of one conversation each."""
    from sglang.test.kl_multiturn_utils import test_input_output_logprobs_match_decode_cache_hit_helper as check

    _, decoded = asserts(server)
    run = functools.partial(
        check,
        server.url,
        server.case.model,
        server.case.kl,
        [prompt + tail for prompt, tail in zip(prompts(server, 4, 60), suffixes(4, 20, 3), strict=True)],
        turn_suffixes=[suffixes(4, 32, 4), suffixes(4, 37, 5)],
        assert_decode_cached_tokens=decoded,
        max_new_tokens=48,
        replay_batch_size=4,
        sampling_temperature=1,
    )
    server.record(request, kl_divergence=divergence(run))


@pytest.mark.slow
@pytest.mark.parametrize("server", [tiny("gdn", f"{NGRAM} 1", "off")], indirect=True, ids=["stock-ngram"])
def test_the_kl_check_finds_a_tree_taken_for_a_chain(server):
    """SGLang verifies NGRAM's trees as chains where the breadth is 1; the plugin, switched off here, mends it."""
    from sglang.test.kl_multiturn_utils import test_input_output_logprobs_match_helper as check

    asked = [prompt + tail for prompt, tail in zip(prompts(server, 4, 60), suffixes(4, 20, 3), strict=True)]
    with pytest.raises(AssertionError, match="avg_kl_div="):
        check(server.url, server.case.model, server.case.kl, asked, max_new_tokens=64, sampling_temperature=1)


def test_prefix_cache_branching(server):
    """SGLang's kit: the second prompt that leaves a cached one caches the state where it leaves; the third hits it."""
    import requests
    from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin

    class Branching(PrefixCacheBranchingMixin):
        cache_chunk_size = server.case.chunk

        @classmethod
        def flush_cache(cls):
            requests.post(f"{cls.base_url}/flush_cache", params={"timeout": 30}).raise_for_status()

        @classmethod
        def send_request_helper(cls, text):
            """Its words as a token each, which they are for the models the kit was written for."""
            words = {"hi": 20, "this": 30, "here": 40, "that": 50}
            ids, rest = [], text
            while rest:
                word = next(word for word in words if rest.startswith(word))
                ids.append(words[word])
                rest = rest[len(word) :]
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
            return requests.post(f"{cls.base_url}/generate", json=body).json()

    server.kit(Branching).test_prefix_cache_branching()


def test_cache_hits_of_conversations(server, tmp_path):
    """SGLang's kit: at the next turn all but the last two chunks of a conversation come from the cache."""
    from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test

    clients, rounds = 4, 3
    texts = [json.loads(line)["question"] for line in lines("train")[: clients * rounds]]
    data = tmp_path / "conversations.json"
    data.write_text(json.dumps([{"conversations": [{"value": text}, {"value": text}]} for text in texts]))
    run_multiturn_cache_hit_test(
        server.url,
        server.case.model,
        num_clients=clients,
        num_rounds=rounds,
        request_length=160,
        output_length=48,
        # a snapshot that lies past the end of an answer is not found
        miss_tolerance=8 if server.case.rewinds else 2 * server.case.chunk + 8,
        dataset_path=str(data),
    )


def test_radix_attention(server, monkeypatch):
    """SGLang's kit, its tree made smaller and its tokens those of the tiny vocabulary."""
    from sglang.test.kits import radix_cache_server_kit as kit

    generate = kit.gen_radix_tree

    def small() -> list[dict[str, Any]]:
        nodes = generate(num_nodes=24, chunk_len=40)
        return [{**node, "input_ids": [10 + token % 600 for token in node["input_ids"]]} for node in nodes]

    monkeypatch.setattr(kit, "gen_radix_tree", small)
    kit.run_radix_attention_test(server.url)


# ------------------------------------------------------------------------------------- several answers, other weights


def say(server, asked: list[list[int]], best: int = 0, **sampling: Any) -> list[dict[str, Any]]:
    """SGLang's replies to the prompts, ``n`` after one another for each of them; greedy unless told. ``best``: of how
    many of the likeliest tokens at each place they tell."""
    import requests

    body = {"input_ids": asked, "return_logprob": True, "top_logprobs_num": best}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True} | sampling
    replies = requests.post(f"{server.url}/generate", json=body, timeout=600)
    replies.raise_for_status()
    return replies.json()


def words(replies: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of each reply."""
    return [reply["output_ids"] for reply in replies]


TIE = 0.25 if GPU else 0.0
"""Log-probability by which a greedy token may lead one that another batch takes instead: in 16 bits, as models are
served on a GPU, batches of other sizes round otherwise."""


LIKELIEST = 20
"""Tokens told of each place: after random ones a tiny model has that many of nearly one log-probability."""


def apart(got: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Where two replies part at no tie, in words; None if nowhere. ``wanted`` has its best tokens told."""
    pairs = enumerate(zip(*words([got, wanted]), strict=True))
    first = next((i for i, (one, other) in pairs if one != other), None)
    if first is None:
        return None
    best = {token: logprob for logprob, token, _ in wanted["meta_info"]["output_top_logprobs"][first]}
    lead = max(best.values()) - best.get(got["output_ids"][first], -math.inf)
    return None if lead < TIE else f"token {first} of {words([got, wanted])}, which led by {lead:.2f}"


def parted(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[str]:
    """Where replies part from the wanted ones at no tie."""
    return [where for pair in zip(got, wanted, strict=True) if (where := apart(*pair))]


def told_apart(
    decode: Callable[[list[int]], str], told: str, wanted: dict[str, Any], whole: bool = False
) -> str | None:
    """Where a text, ``whole`` or its beginning, parts from a reply's at no tie, in words; None if nowhere."""
    text = wanted["text"] if whole else wanted["text"][: len(told)]
    first = next((i for i, (one, other) in enumerate(itertools.zip_longest(told, text)) if one != other), None)
    if first is None:
        return None
    tokens, best = wanted["output_ids"], wanted["meta_info"]["output_top_logprobs"]
    wrote = next((i for i in range(len(tokens)) if len(decode(tokens[: i + 1])) > first), len(tokens) - 1)
    # the token before it may have been another that begins alike
    leads = [best[i][0][0] - best[i][1][0] for i in (wrote - 1, wrote) if i >= 0]
    return None if min(leads) < TIE else f"character {first} of {told!r} and {text!r}, led by {min(leads):.2f}"


def test_greedy_answers_of_one_prompt_are_equal(server):
    """Three a prompt, in one batch and from a cache of what their prompt left; and what one is told."""
    asked = prompts(server, 2, 200)
    alone = say(server, asked, best=LIKELIEST)
    assert parted(say(server, asked, n=3), [answer for answer in alone for _ in range(3)]) == []
    assert parted(say(server, asked), alone) == []


@pytest.mark.once
@pytest.mark.parametrize(("tie", "told"), [(0.0, "token 1"), (0.2, None)])
def test_answers_may_part_at_a_tie(monkeypatch, tie, told):
    monkeypatch.setitem(globals(), "TIE", tie)
    best = [[(-0.1, 5, None), (-3.0, 6, None)], [(-0.7, 7, None), (-0.8, 8, None)], [(-0.1, 9, None), (-4.0, 3, None)]]
    wanted = {"output_ids": [5, 7, 9], "meta_info": {"output_top_logprobs": best}}
    assert apart(wanted, wanted) is None
    where = apart({"output_ids": [5, 8, 3]}, wanted)
    assert where is None if told is None else where.startswith(told)
    assert "token 0" in apart({"output_ids": [6, 7, 9]}, wanted)
    assert "led by inf" in apart({"output_ids": [4, 7, 9]}, wanted)


@pytest.mark.once
@pytest.mark.parametrize("tie", [0.0, 0.2])
def test_texts_may_part_at_a_tie(monkeypatch, tie):
    monkeypatch.setitem(globals(), "TIE", tie)
    best = [[(-0.1, 0, None), (-3.0, 6, None)], [(-0.7, 1, None), (-0.8, 3, None)], [(-0.1, 2, None), (-4.0, 3, None)]]
    best += [[(-0.1, 0, None), (-4.0, 3, None)]]
    wanted = {"output_ids": [0, 1, 2, 0], "text": "ab12ab", "meta_info": {"output_top_logprobs": best}}
    decode = functools.partial(decoded, ["ab", "1", "2"])
    assert told_apart(decode, "ab1", wanted) is None and told_apart(decode, "ab12ab", wanted, whole=True) is None
    for told in ("ab3", "ab13", "ab3" * 3):  # another token, one that begins alike, and what follows it
        assert (told_apart(decode, told, wanted) is None) == (tie > 0), told
    assert "character 0" in told_apart(decode, "b", wanted)
    assert "character 5" in told_apart(decode, "ab12aa", wanted)
    assert "character 5" in told_apart(decode, "ab12a", wanted, whole=True), "cut short"
    assert "character 6" in told_apart(decode, "ab12aba", wanted), "goes on"


def decoded(words: list[str], tokens: list[int]) -> str:
    return "".join(words[token] for token in tokens)


def test_drawn_answers_of_one_prompt_are_their_own(server, request):
    """Three a prompt at temperature 1: each one's log-probabilities are those of a prefill of just its own tokens."""
    from sglang.test import kl_multiturn_utils as kl

    asked = [prompt + tail for prompt, tail in zip(prompts(server, 4, 70), suffixes(4, 30, 6), strict=True)]
    replies = say(server, asked, n=3, temperature=1)
    answers = words(replies)
    assert len(answers) == 12 and {len(answer) for answer in answers} == {24}
    alike = [len({tuple(answer) for answer in answers[first : first + 3]}) == 1 for first in (0, 3, 6, 9)]
    assert not all(alike), "nothing was drawn"
    whole = [asked[i // 3] + answer for i, answer in enumerate(answers)]
    said = [kl._extract_output_logprobs(reply) for reply in replies]
    model, bound = server.case.model, server.case.kl
    check = functools.partial(kl._replay_and_compare_kl, server.url, model, bound, whole, said, "n", batch_size=4)
    server.record(request, kl_divergence=divergence(check))


def test_other_weights_leave_nothing_of_the_first(server, tmp_path):
    """`/update_weights_from_disk`: the same weights say the same, others say something else, and the first again."""
    if server.case.data is not None:
        pytest.skip("writes a copy of the model, a tiny one")
    if "NGRAM" in server.case.flags and importlib.metadata.version("sglang") == "0.5.17":
        pytest.skip("0.5.17 ends where NGRAM is told to load weights, which it has none of")
    asked = prompts(server, 2, 200)
    first = say(server, asked, best=LIKELIEST)
    reloads.load(server.url, server.case.model)
    assert parted(say(server, asked), first) == []

    other = reloads.with_other_decays(Path(server.case.model), tmp_path / "other")
    try:
        reloads.load(server.url, other)
        changed = say(server, asked, best=LIKELIEST)
        assert {reply["meta_info"]["cached_tokens"] for reply in changed} == {0}, "the first weights' states were found"
        assert all(a != b for a, b in zip(words(changed), words(first), strict=True)), "the weights were not loaded"
        assert parted(say(server, asked), changed) == [], "what was cached since is of other weights"
    finally:
        reloads.load(server.url, server.case.model)
    assert parted(say(server, asked), first) == []


# ------------------------------------------------------------------------------------------------ clients that are gone


def load(server) -> dict[str, Any]:
    """What SGLang says is at work."""
    import requests

    answer = requests.get(f"{server.url}/v1/loads", timeout=60)
    answer.raise_for_status()
    (rank,) = answer.json()["loads"]
    return rank


def at_rest(server) -> bool:
    """Whether nothing is at work any more, nor kept for it, when some time has passed."""
    counts = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return wait_for(lambda: not any(load(server)[name] for name in counts), 120)


def flush(server) -> None:
    """Have the server forget what it has cached."""
    import requests

    requests.post(f"{server.url}/flush_cache", params={"timeout": 60}, timeout=120).raise_for_status()


def test_clients_that_are_gone_leave_nothing(server):
    """More clients than run at a time close their connections, before an answer or in the middle of one.

    One stays, beside them. Afterwards first and second turns are answered as by a server that never saw those: the
    second turns begin in the answers that were broken off.
    """
    from transformers import AutoTokenizer

    decode = functools.partial(AutoTokenizer.from_pretrained(server.case.model).decode, skip_special_tokens=True)
    *asked, stays = prompts(server, 4, 200)
    tails = suffixes(3, 20, 7)
    flush(server)
    first = say(server, asked, best=LIKELIEST, max_new_tokens=96)
    (whole,) = say(server, [stays], best=LIKELIEST, max_new_tokens=200)
    turns = [prompt + answer[:30] + tail for prompt, answer, tail in zip(asked, words(first), tails, strict=True)]
    flush(server)
    second = say(server, turns, best=LIKELIEST)

    flush(server)
    assert at_rest(server)
    beside = Client(server.port, stays, 200)
    gone = [
        Client(server.port, prompt, 6000, path=path, leaves_after=characters)
        for characters, path in ((40, "/generate"), (60, "/v1/completions"), (80, "/generate"), (20, "/v1/completions"))
        for prompt in asked
    ]
    assert wait_for(lambda: load(server)["num_running_reqs"] > 4, 120)
    gone += [Client(server.port, prompt, 6000, leaves_after=0) for prompt in (*asked, *asked)]
    for client in (beside, *gone):
        client.join(300)
    assert [client.error for client in (beside, *gone) if client.error] == []
    assert not any(client.complete or client.is_alive() for client in gone)
    told = [told_apart(decode, client.told[:60], answer) for client, answer in zip(gone, first * 6, strict=True)]
    assert list(filter(None, told)) == []
    assert beside.complete and told_apart(decode, beside.told, whole, whole=True) is None

    assert at_rest(server)
    assert parted([*say(server, asked, max_new_tokens=96), *say(server, turns)], [*first, *second]) == []
    assert server.process.poll() is None  # SGLang counts what is free when it is idle, and ends where some is missing


# --------------------------------------------------------------------------------------------------- SGLang's own kits


def checks(server, runs: kits.Runs) -> Any:
    """The kit over this server."""
    import openai
    from transformers import AutoTokenizer

    told = {
        "served_model_name": server.case.model,
        "client": openai.Client(api_key="EMPTY", base_url=f"{server.url}/v1"),
        "tokenizer": AutoTokenizer.from_pretrained(server.case.model),
    }
    return server.kit(kits.mixin(runs.kit, server.case.model), **told, **runs.attributes)


@pytest.mark.parametrize(("runs", "name"), kits.cases())
def test_kit(server, runs, name):
    """What SGLang asks of any server."""
    if runs.flags not in server.case.flags:
        pytest.skip(f"the server was started without {runs.flags}")
    try:
        getattr(checks(server, runs), name)()
    finally:  # one that fails while the server pauses leaves it so
        server.go_on()
    assert server.process.poll() is None


def own_servers() -> list[Any]:
    """Servers and what they are started for, as parameters (server, runs)."""
    shapes = {"gdn-chain": ("gdn", CHAIN), "mamba2-tree": ("mamba2", TREE)}
    return [
        pytest.param(
            tiny(family, f"{flags} {runs.flags}", environment=runs.environment), runs, id=f"{shape}-{runs.tests[0]}"
        )
        for runs in kits.OF_THEIR_OWN
        for shape, (family, flags) in shapes.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("server", "runs"), own_servers(), indirect=["server"])
def test_kit_that_is_served_alone(server, runs):
    """Those of a server that gives requests up after a time. It does, and what it keeps is answered as before."""
    asked = prompts(server, 1, 200)
    first = words([say(server, [prompt])[0] for prompt in asked])
    check, refused = checks(server, runs), []
    check.assertEqual = lambda code, wanted: refused.append(code == wanted)
    (name,) = runs.tests
    getattr(check, name)()
    assert refused and all(refused)
    assert at_rest(server)
    assert words([say(server, [prompt])[0] for prompt in asked]) == first
    assert server.process.poll() is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kit_asks_for_the_tokens_that_a_model_draws(family, monkeypatch):
    """Its tokenizer has not all of them. What was drawn is asked for again as it is, what is past them as another."""
    import requests
    from sglang.test.kits import spec_server_kits
    from transformers import AutoTokenizer

    model = str(LAUNCH / "models" / f"tiny-{family}")
    known, last = len(AutoTokenizer.from_pretrained(model)), kits.vocabulary(model) - 1
    assert known < last
    sent: dict[str, Any] = {}
    monkeypatch.setattr(requests, "post", lambda url, json: sent.update(json))
    kits.mixin("spec_server_kits.SpecLogprobKit", model)
    spec_server_kits.requests.post("http://server/generate", json={"input_ids": [0, known, last, last + 1]})
    *drawn, past = sent["input_ids"]
    assert drawn == [0, known, last]
    assert past < known


def test_every_kit_is_named():
    """Each test of SGLang's kits runs here or has its reason, and nothing else is named."""
    tests = list(kits.in_the_wheel())
    assert [test for test in tests if not kits.named(test)] == []
    if importlib.metadata.version("sglang") == VERSIONS[-1].removeprefix("sglang-"):
        used = {entry for test in tests for entry in kits.named(test)}
        older = {"hellaswag_kit", "spec_server_kits.SpecLogprobKit.test_logprob_spec_v2_match"}
        assert {*kits.ELSEWHERE, *kits.NOT, *kits.run()} - used == older
