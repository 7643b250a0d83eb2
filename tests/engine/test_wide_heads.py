"""GDN heads as wide as real models': SGLang prefills with FlashInfer then, without being asked to."""

from __future__ import annotations

import importlib.metadata
from unittest import mock

import pytest

from . import models, scenarios
from .harness import run
from .matrix import Case

WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "torch_dtype": "bfloat16"}


@pytest.mark.gpu
def test_no_prefill_waits(tmp_path):
    """0.5.23 on Hopper: every prefill is prepared while CUDA raises on whatever would wait for the device."""
    if importlib.metadata.version("sglang") == "0.5.17":
        pytest.skip("0.5.17 takes FlashInfer by itself on Blackwell only")
    with mock.patch.dict(models.QWEN3_NEXT, WIDE):
        models.write_qwen3_next(tmp_path)
    case = Case("gdn", "nextn-chain", "extra_buffer-overlap", "replay")
    spec = case.spec(
        str(tmp_path),
        device="cuda",
        dtype="bfloat16",
        chunked_prefill_size=256,  # a prompt ends off a boundary within its chunk: then there is a plan
        record_live=False,
        timeout=400.0,
        sabotage="no_wait",
    )
    result = run(spec, [scenarios.turns(models.VOCAB - 1), scenarios.chunked(models.VOCAB - 1)])
    assert "extend=FlashInferGDNKernel" in result.log
    assert "a prefill has planned its checkpoints" in result.log
    assert all(outcome.finish == "length" for outcome in result.outcomes.values())
