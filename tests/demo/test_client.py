"""Prompts, answers and what is read from the server's replies."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import threading
from pathlib import Path

import pytest
from mtp_demo import client
from mtp_demo.client import Batch, Problem

from .builders import answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 3+4=<<3+4=7>>7\n#### 7", 7),
        ("#### 1,234", 1234),
        ("first 5, then 6", 6),
        ("#### -3", 3),  # as SGLang's benchmark: digits only
        ("no number", None),
        ("", None),
    ],
)
def test_an_answer_is_its_last_number(text, value):
    assert client.answer_value(text) == value


@pytest.fixture(scope="module")
def benchmark():
    """The functions of sglang.test.few_shot_gsm8k, without the ten seconds of importing it."""
    path = importlib.metadata.distribution("sglang").locate_file("sglang/test/few_shot_gsm8k.py")
    tree = ast.parse(Path(str(path)).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("get_")]
    names = {"re": re, "ast": ast, "INVALID": None}
    exec(compile(tree, "few_shot_gsm8k", "exec"), names)
    return names


@pytest.mark.parametrize("text", ["a 3+4=<<3+4=7>>7\n#### 7", "#### 1,234", "5 or 6", "no number"])
def test_answers_read_like_sglangs_benchmark(benchmark, text):
    assert client.answer_value(text) == benchmark["get_answer_value"](text)


def test_prompts_are_sglangs_benchmarks(benchmark):
    shots = [Problem("a?", "#### 1"), Problem("b?", "#### 2")]
    lines = [{"question": shot.question, "answer": shot.answer} for shot in shots] + [{"question": "c?"}]
    expected = benchmark["get_few_shot_examples"](lines, 2) + benchmark["get_one_example"](lines, 2, False)
    assert client.prompt_text(shots, "c?") == expected
    assert client.prompt_text(shots, "c?").startswith(client.shots_text(shots))


def test_accuracy_counts_right_answers_and_missing_ones():
    problems = [Problem("", "#### 7")] * 4
    answers = [answer(text=text) for text in ("#### 7", "#### 8", "nothing", "so 7")]
    assert client.accuracy(answers, problems) == 0.5


def test_accept_length_leaves_out_the_token_of_the_prefill():
    batch = Batch((answer(tuple(range(10)), verify_steps=4), answer(tuple(range(5)), verify_steps=2)), 3.0)
    assert batch.accept_length == 1 + (5 + 2) / 6
    assert batch.accept_length_of_sglang == 15 / 6
    assert batch.tokens_per_second == 5.0


def test_without_verifies_there_is_no_accept_length():
    assert Batch((answer(),), 1.0).accept_length is None


def test_a_reply_without_and_with_speculation():
    meta = {"prompt_tokens": 9, "cached_tokens": 4, "finish_reason": {"type": "stop", "matched": "Question"}}
    plain = client.parse_reply({"text": "x", "output_ids": [5, 6], "meta_info": meta})
    assert (plain.tokens, plain.verify_steps, plain.finish) == ((5, 6), 0, "stop")
    meta |= {"spec_verify_ct": 1, "spec_num_correct_drafts": 1}
    assert client.parse_reply({"text": "x", "output_ids": [5, 6], "meta_info": meta}).verify_steps == 1


def test_scores_are_the_outputs_positions():
    meta = {
        "input_token_logprobs": [[None, 8, None], [-0.1, 5, None], [-0.9, 6, None]],
        "input_top_logprobs": [None, [[-0.1, 5, None], [-3.0, 9, None]], [[-0.5, 7, None], [-0.9, 6, None]]],
    }
    first, second = client.parse_scores({"meta_info": meta}, [5, 6])
    assert (first.token, first.top) == (5, ((-0.1, 5), (-3.0, 9)))
    assert second.top[0] == (-0.5, 7)


def test_scores_of_other_tokens_are_refused():
    meta = {"input_token_logprobs": [[-0.1, 5, None]], "input_top_logprobs": [[[-0.1, 5, None], [-3.0, 9, None]]]}
    with pytest.raises(ValueError, match="do not line up"):
        client.parse_scores({"meta_info": meta}, [6])


class _Server:
    """Answers with the prompt; counts how many requests are open at once."""

    def __init__(self, parallel: int) -> None:
        self.together = threading.Barrier(parallel, timeout=10)

    def post(self, path, body):
        self.together.wait()
        meta = {"prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "finish_reason": None}
        return {"text": "", "output_ids": body["input_ids"], "meta_info": meta}


def test_questions_are_asked_together_and_answered_in_order():
    steps = []
    prompts = [[n] for n in range(6)]
    batch = client.ask_all(_Server(3), prompts, max_new_tokens=8, parallel=3, on_answer=lambda: steps.append(1))
    assert [list(a.tokens) for a in batch.answers] == prompts
    assert len(steps) == 6


def test_problems_are_read_from_the_head_of_a_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": "#### 1"}) + "\n" for n in range(5)))
    assert [problem.question for problem in client.read_problems(path, 3)] == ["q0", "q1", "q2"]
