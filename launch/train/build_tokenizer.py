"""Rebuild launch/train/tokenizer from the word problems."""

from pathlib import Path

from tinymodels import tokenizer

if __name__ == "__main__":
    folder = Path(__file__).parent / "tokenizer"
    built = tokenizer.build()
    tokenizer.save(built, folder)
    print(f"{built.get_vocab_size()} tokens -> {folder}")
