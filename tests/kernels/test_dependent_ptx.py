"""Kernels that start while the one before them runs: what they do until that has ended, as compiled."""

from __future__ import annotations

from .helpers import run_compiling


def test_nothing_is_written_before_the_kernel_before_has_ended():
    run = run_compiling(f"{__package__}.dependent_ptx")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    prepare, *rest = (line.split(";") for line in run.stdout.splitlines())
    by_products, verifies, scores, once_waited = rest[:3], rest[3:6], rest[6], rest[7:-1]
    # (else they would start early for nothing, or never be waited for)
    for looks_up in (prepare, *by_products, *verifies, scores):
        assert "ld.global" in looks_up[0] and "st.global" in looks_up[1], run.stdout
    assert len(once_waited) == 5, run.stdout
    # whoever waits for what runs beside the commit waits for that too
    assert "wait" in rest[-1][0] and not any("launch_dependents" in part for part in rest[-1]), run.stdout
    for lets_go in (prepare[1], scores[1], *(each[0] for each in by_products), *(each[1] for each in once_waited)):
        assert "launch_dependents" in lets_go, run.stdout
