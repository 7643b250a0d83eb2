"""The generator, its split, the tokenizer and the packed corpus."""

import itertools
import json
import re

import pytest
import torch
from tinymodels import corpus, tokenizer
from tinymodels.problems import answer_value, few_shot_prompt, problems, split_of
from tinymodels.templates import TEMPLATES


def take(seed, split, count):
    return list(itertools.islice(problems(seed, split), count))


def test_seeded_and_disjoint():
    assert take(1, "train", 50) == take(1, "train", 50) != take(2, "train", 50)
    train = {p.question for p in take(0, "train", 20_000)}
    assert not train & {p.question for p in take(0, "test", 2_000)}
    assert split_of(0, {"a": 3, "b": 4}) in ("train", "test")
    with pytest.raises(ValueError, match="split"):
        next(problems(0, "valid"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right(split):
    for problem in take(3, split, 2_000):
        worked, last = problem.answer.rsplit("\n#### ", 1)
        results = re.findall(r"(\d+)([-+*])(\d+)=<<(\d+)\2(\d+)=(\d+)>>(\d+)", worked)
        assert len(results) == worked.count("<<") >= 1
        for a, sign, b, a2, b2, value, again in results:
            assert (a, b, value) == (a2, b2, again)
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(value) < 200
        assert int(last) == answer_value(problem.answer) == int(results[-1][-1])
        assert "{" not in problem.question + problem.answer


def test_every_template_occurs():
    questions = [p.question for p in take(0, "train", 3_000)]
    endings = {template.question.rsplit(" ", 3)[-1] for template in TEMPLATES}
    assert all(any(q.endswith(ending) for q in questions) for ending in endings)


def test_committed_files_are_what_the_generator_writes(models_folder):
    for split, count in (("test", 200), ("train", 64)):
        lines = (models_folder / "data" / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [p.to_json() for p in take(0, split, count)]


def test_tokens_of_parts_are_tokens_of_the_whole(tokenizer_folder):
    tok = tokenizer.load(tokenizer_folder)
    for problem in take(5, "test", 100):
        prompt, answer = few_shot_prompt([], problem.question), f" {problem.answer}"
        whole = f"{prompt}{answer}\n\nQuestion: next"
        parts = [prompt, answer, "\n\n", "Question: next"]
        assert tok.encode(whole).ids == [i for part in parts for i in tok.encode(part).ids]
        assert tok.decode(tok.encode(whole).ids) == whole
    assert len(tok.encode("198").ids) == 3
    assert tok.encode("\n\n####").tokens == ["Ċ", "Ċ", "####"]


def test_tokenizer_rebuilds_and_loads_in_transformers(tokenizer_folder, tmp_path):
    tokenizer.save(tokenizer.build(), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == (tokenizer_folder / "tokenizer.json").read_text()
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tokenizer_folder)
    text = "Question: Tom has 12 é.\nAnswer: 3+4=<<3+4=7>>7.\n#### 7"
    assert auto.decode(auto(text).input_ids) == text
    assert (auto.eos_token, auto.pad_token) == (tokenizer.END, tokenizer.PAD)
    chat = auto.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>Question: Why?\nAnswer:<|assistant|>"


def test_corpus(tokenizer_folder):
    text = corpus.build(tokenizer_folder, seed=1, count=300, workers=1)
    tok = tokenizer.load(tokenizer_folder)
    starts = {tok.token_to_id("Question"), tok.token_to_id(tokenizer.USER)}
    assert set(text.tokens[text.starts].tolist()) == starts
    decoded = tok.decode(text.tokens.tolist(), skip_special_tokens=False)
    assert decoded.count(tokenizer.USER) >= decoded.count(tokenizer.END) > 10
    tokens, weights = text.batch(4, 130, torch.Generator().manual_seed(0))
    assert tokens.shape == weights.shape == (4, 130)
    assert sorted(weights.unique().tolist()) == pytest.approx([corpus.QUESTION_WEIGHT, 1.0])
