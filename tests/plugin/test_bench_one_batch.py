"""SGLang's one-batch benchmark with the plugin, as a user starts it, on models with a small vocabulary."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "launch" / "models"


def _benchmark(model: str, *arguments: str) -> None:
    sys.argv = ["bench_one_batch", "--model-path", str(MODELS / model), "--device", "cpu", "--dtype", "float32"]
    sys.argv += ["--batch-size", "2", "--input-len", "16", "--output-len", "3", "--result-filename", "", *arguments]
    runpy.run_module("sglang_mamba_mtp.bench_one_batch", run_name="__main__")


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-mamba2"])
def test_tiny_models(model, forked):
    """Their vocabulary has 704 ids; the benchmark draws its prompts below 10,000."""
    found = forked(lambda: _benchmark(model))
    assert found.code == 0, found.output
    assert "IndexError" not in found.output
    measured = found.output.partition("Benchmark ...")[2]
    assert re.search(r"Prefill\. latency: .*\n(.*Decode \d\. .*\n){2}", measured), found.output


def test_flags_are_the_plugins_too(forked):
    found = forked(lambda: _benchmark("tiny-gdn", "--mamba-mtp-mode", "fast"))
    assert found.code == 1 and "--mamba-mtp-mode fast: expected one of replay" in found.output
