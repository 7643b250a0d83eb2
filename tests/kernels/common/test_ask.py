"""What is asked for ahead: every line, none outside, and by an instruction that no compiler drops."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from mamba_mtp_kernels.common.ask import line_starts

from ..helpers import run_compiling


@triton.jit
def _starts_kernel(x, out, inside, SIZE: tl.constexpr, LINES: tl.constexpr):
    tl.store(out + tl.arange(0, LINES), line_starts(x.dtype.element_ty, SIZE, inside))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "inside"), [(128, 128), (256, 192), (256, 160), (4096, 1000), (16, 16), (64, 40)])
def test_every_line_once_and_none_outside(dtype: torch.dtype, size: int, inside: int, device: torch.device) -> None:
    per_line = 128 // dtype.itemsize
    lines = triton.cdiv(size, per_line)
    out = torch.full((lines,), -1, dtype=torch.int32, device=device)
    _starts_kernel[(1,)](torch.empty(0, dtype=dtype, device=device), out, inside, size, lines)
    starts = out.tolist()
    wanted = range(0, inside, per_line)
    assert starts[: len(wanted)] == list(wanted)
    assert set(starts[len(wanted) :]) <= {inside - 1}


def test_the_compiler_keeps_it() -> None:
    run = run_compiling(f"{__package__}.asked")
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["prefetch.global.L2"]
