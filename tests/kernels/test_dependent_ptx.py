"""Kernels that start while the one before them runs: what they do until that has ended, as compiled."""

from __future__ import annotations

from .helpers import run_compiling


def test_nothing_is_written_before_the_kernel_before_has_ended():
    run = run_compiling(f"{__package__}.dependent_ptx")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    kernels = {name: done.split(";") for name, done in (line.split(": ", 1) for line in run.stdout.splitlines())}
    assert len(kernels) == 15, run.stdout
    beside = kernels.pop("beside the commit")
    # whoever waits for what runs beside the commit waits for that too
    assert "wait" in beside[0] and not any("launch_dependents" in part for part in beside), run.stdout
    for name, (before, after) in kernels.items():
        if "verify" in name or "prepare" in name or name == "mamba2 scores":
            # (else they would start early for nothing, or never be waited for)
            assert "ld.global" in before and "st.global" in after, run.stdout
        if "verify" in name:
            assert "launch_dependents" not in before + after, run.stdout
        else:
            assert "launch_dependents" in (before if "by products" in name else after), run.stdout
