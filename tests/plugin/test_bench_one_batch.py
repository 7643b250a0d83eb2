"""SGLang's one-batch benchmark with the plugin, as a user starts it, on the tiny models with their small vocabularies."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from sglang_mamba_mtp import bench_one_batch

MODELS = Path(__file__).parents[2] / "launch" / "models"


def _benchmark(model: str, *arguments: str) -> None:
    sys.argv = ["bench_one_batch", "--model-path", str(MODELS / model), "--device", "cpu", "--dtype", "float32"]
    sys.argv += ["--batch-size", "2", "--input-len", "16", "--output-len", "3", "--result-filename", "", *arguments]
    runpy.run_module(bench_one_batch.__name__, run_name="__main__")


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
    assert found.code == 1 and "no such mode 'fast'" in found.output
