"""Heads as wide as real models', which FlashInfer's kernels need: SGLang prefills GDN with them without being asked to,
and decodes Mamba2 with them where it is asked to."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from unittest import mock

import pytest

from . import models, scenarios
from .harness import check_equal, run
from .matrix import Case


@pytest.mark.gpu
def test_no_prefill_waits(tmp_path):
    """0.5.23 on Hopper: every prefill is prepared while CUDA raises on whatever would wait for the device."""
    if importlib.metadata.version("sglang") == "0.5.17":
        pytest.skip("0.5.17 takes FlashInfer by itself on Blackwell only")
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("no CuTe-DSL, without which FlashInfer's prefill is not taken")
    models.write_wide_qwen3_next(tmp_path)
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mode, algorithm", [("replay", "nextn-tree"), ("slots", "ngram-tree"), ("snapshot", "nextn-chain")]
)
def test_flashinfers_mamba_kernel(mode, algorithm, tmp_path):
    """`--mamba-backend flashinfer`: its kernel verifies in snapshot; elsewhere it waits for plain decodes."""
    with mock.patch.dict(models.NEMOTRON_H, {"mamba_head_dim": 64, "ssm_state_size": 128}):
        models.write_nemotron_h(tmp_path)
    case = Case("mamba2", algorithm, "extra_buffer-overlap", mode)
    extra = {"mamba_backend": "flashinfer"}
    spec = case.spec(str(tmp_path), device="cuda", record_live=False, timeout=400.0, extra=extra)
    todo = [scenarios.turns(models.VOCAB - 1), scenarios.staggered(models.VOCAB - 1)]
    result = run(spec, todo)
    assert result.graphs > 0
    check_equal(result, todo)
