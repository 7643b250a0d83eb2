"""Seeded word problems in GSM8K's format, split into train and test by their numbers.

A question's split is a hash of its template and its numbers: no held-out combination of numbers is ever seen in
training in the same template, whatever the names.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from tinymodels.templates import OBJECTS, PEOPLE, PLACES, TEMPLATES, Template

SPLITS = ("train", "test")
TEST_SHARE = 16  # one combination of numbers in TEST_SHARE is held out
MAX_VALUE = 199

_STEP = re.compile(r"\[(\w)=(\w)([-+*])(\w)\]")
_OPERATION = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@dataclass(frozen=True)
class Problem:
    """question: the text; answer: worked steps, then a line ``#### n``."""

    question: str
    answer: str

    def to_json(self) -> dict[str, str]:
        return {"question": self.question, "answer": self.answer}


def split_of(template_id: int, numbers: dict[str, int]) -> str:
    """The split that a template with these numbers belongs to."""
    key = f"{template_id}:" + ",".join(f"{name}={value}" for name, value in sorted(numbers.items()))
    return "test" if zlib.crc32(key.encode()) % TEST_SHARE == 0 else "train"


def _work(template: Template, numbers: dict[str, int]) -> tuple[list[str], int] | None:
    """Expand every step; None where a value leaves 1..MAX_VALUE."""
    values = dict(numbers)
    last = 0

    def expand(match: re.Match[str]) -> str:
        nonlocal last
        name, left, sign, right = match.groups()
        last = values[name] = _OPERATION[sign](values[left], values[right])
        expression = f"{values[left]}{sign}{values[right]}"
        return f"{expression}=<<{expression}={last}>>{last}"

    lines = []
    for step in template.steps:
        lines.append(_STEP.sub(expand, step))
        if not 1 <= last <= MAX_VALUE:
            return None
    return lines, last


def sample(rng: random.Random, split: str) -> Problem:
    """One problem of a split ("train" or "test")."""
    while True:
        template_id = rng.randrange(len(TEMPLATES))
        template = TEMPLATES[template_id]
        numbers = {name: rng.randint(low, high) for name, (low, high) in template.ranges.items()}
        if split_of(template_id, numbers) != split:
            continue
        worked = _work(template, numbers)
        if worked is None:
            continue
        person, other = rng.sample(PEOPLE, 2)
        words = {"p": person, "p2": other, "o": rng.choice(OBJECTS), "w": rng.choice(PLACES)}
        lines, result = worked
        question = template.question.format(**words, **numbers)
        answer = "\n".join(line.format(**words) for line in lines) + f"\n#### {result}"
        return Problem(question, answer)


def problems(seed: int, split: str) -> Iterator[Problem]:
    """An endless stream, the same for the same seed and split."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"{split}-{seed}")
    while True:
        yield sample(rng, split)


def few_shot_prompt(examples: list[Problem], question: str) -> str:
    """SGLang's few-shot GSM8K prompt: solved examples, then the open question."""
    shots = "".join(f"Question: {p.question}\nAnswer: {p.answer}\n\n" for p in examples)
    return f"{shots}Question: {question}\nAnswer:"


def answer_value(text: str) -> int | None:
    """The last number of a text, as SGLang's benchmark reads an answer."""
    found = re.findall(r"\d+", text.replace(",", ""))
    return int(found[-1]) if found else None
