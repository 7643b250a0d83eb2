"""The two models by the name the command line uses."""

from tinymodels.base import TinyModel
from tinymodels.gdn import TinyGdn
from tinymodels.mamba2 import TinyMamba2

MODELS: dict[str, type[TinyModel]] = {"gdn": TinyGdn, "mamba2": TinyMamba2}


def padded_vocab(tokens: int) -> int:
    """Vocabulary size of the model for a tokenizer of ``tokens`` entries: the next multiple of 64."""
    return -(-tokens // 64) * 64
