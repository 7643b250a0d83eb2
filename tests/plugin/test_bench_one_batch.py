"""SGLang's one-batch benchmark with the plugin, as a user starts it, on models with a small vocabulary."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.operations import Operations

MODELS = Path(__file__).parents[2] / "launch" / "models"


def _benchmark(model: str, *arguments: str) -> None:
    sys.argv = ["bench_one_batch", "--model-path", str(MODELS / model), "--device", "cpu", "--dtype", "float32"]
    sys.argv += ["--batch-size", "2", "--input-len", "16", "--output-len", "3", "--result-filename", "", *arguments]
    runpy.run_module("sglang_mamba_mtp.bench_one_batch", run_name="__main__")


def test_flags_are_the_plugins_too(forked):
    found = forked(lambda: _benchmark("tiny-gdn", "--mamba-mtp-mode", "fast"))
    assert found.code == 1 and "--mamba-mtp-mode fast: expected one of replay" in found.output


def _count(model: str, mode: str) -> None:
    """Print of every decode step its operations, and how many functions in Python it calls."""
    from sglang.benchmark import one_batch

    decode = one_batch.decode

    def counted(*args):
        calls = 0

        def note(frame, event, arg):
            nonlocal calls
            calls += event == "call"

        with Operations() as operations:
            decode(*args)
        sys.setprofile(note)
        try:
            return decode(*args)
        finally:
            sys.setprofile(None)
            print(f"step {json.dumps([operations.names, calls])}", flush=True)

    one_batch.decode = counted
    _benchmark(model, "--mamba-mtp-mode", mode)


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-mamba2"])
def test_without_speculation_a_step_is_sglangs(model, forked):
    """The same operations, and next to nothing around them: what a GPU's clock is too coarse for.

    The models' vocabulary has 704 ids; the benchmark draws its prompts below 10,000."""
    steps = {}
    for mode in ("off", "replay"):
        found = forked(lambda mode=mode: _count(model, mode))
        assert found.code == 0, found.output
        steps[mode] = [json.loads(told) for told in re.findall(r"^step (.*)$", found.output, re.MULTILINE)]
        measured = re.sub(r"(?m)^step .*\n", "", found.output.partition("Benchmark ...")[2])
        assert re.search(r"Prefill\. latency: .*\n(.*Decode \d\. .*\n){2}", measured), found.output
    assert len(steps["off"]) == len(steps["replay"]) > 2
    for (operations, calls), (ours, our_calls) in zip(steps["off"], steps["replay"], strict=True):
        assert len(operations) > 50 and ours == operations
        assert calls < our_calls <= calls + 20, f"{calls} calls in mode off, {our_calls} with hooks"
