"""Build and load the tokenizer: byte-level BPE over context-free pieces, one token a digit.

Pieces (words with their leading space, single digits, single newlines, ``<<``, ``>>``, ``####``, other signs) do not
depend on what follows, so the tokens of a text are the tokens of its parts, wherever the parts are joined at a piece.
"""

import itertools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinymodels.problems import problems

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (PAD, USER, ASSISTANT, END)
PIECES = r"\n|[0-9]| ?(?:<<|>>|####)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '<|assistant|> ' + m['content'] + '<|end|>' }}"
    "{% elif 'Question:' in m['content'] %}{{ '<|user|>' + m['content'] }}"
    "{% else %}{{ '<|user|>Question: ' + m['content'] + '\nAnswer:' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(vocab_size: int = 1024, samples: int = 20_000) -> Tokenizer:
    """Train the tokenizer on the train split; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"Question: {p.question}\nAnswer: {p.answer}\n\n" for p in problems(0, "train"))
    tokenizer.train_from_iterator(itertools.islice(texts, samples), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json as AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    """The plain tokenizers object of a folder that save() wrote."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
