"""Kernels that start while the one before them runs: what they do until that has ended, as compiled."""

from __future__ import annotations

from .helpers import run_compiling


def test_nothing_is_written_and_nobody_let_go_before_the_kernel_before_has_ended():
    run = run_compiling(f"{__package__}.dependent_ptx")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    prepare, products, verify, convolution = run.stdout.splitlines()
    # (else they would start early for nothing)
    assert "ld.global" in prepare and "waits: 2" in prepare, prepare
    assert "ld.global" in products and "waits: 3" in products, products
    assert "prefetch" in verify and "waits: 3" in verify, verify
    assert "waits: 1" in convolution, convolution
