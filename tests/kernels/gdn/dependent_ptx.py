"""Compile prepare for sm_90 (no GPU needed) and show what it does before the convolution has ended.

    python -m tests.kernels.gdn.dependent_ptx      # exits with 1 where that is more than to look up and to ask for

Its outputs may lie where a tensor was that the convolution still reads, and verify is not to start before that has
ended.
"""

from __future__ import annotations

import os
import re
import sys

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.gdn import verify_replay as verify_module

from ..hopper import compiled

NODES, THRESHOLD, HEADS, DIMS = 4, 12, (2, 4), (32, 16)
"""HEADS (H, HV), DIMS (K, V)."""
POINTERS = {
    **dict.fromkeys(("q", "a", "b", "A_log", "dt_bias", "window_k", "carried"), "bf16"),
    **dict.fromkeys(("window_g", "window_beta", "window_factors", "weights", "fold_factors"), "fp32"),
    **dict.fromkeys(("slots", "rows", "pending", "newest", "order"), "i32"), "ancestors": "i64",
}  # fmt: skip


def main() -> int:
    config = verify_module.default_config(
        nodes=NODES, values=DIMS[1], exact=False, fold_threshold=THRESHOLD, overlap=True
    )
    constants, _ = verify_module.constants_for(
        config, nodes=NODES, heads=HEADS, dims=DIMS, fold_threshold=THRESHOLD, fold_at_once=fold_at_once(NODES),
        state=torch.float32,
    )  # fmt: skip
    kernel = compiled(
        verify_module.prepare_kernel, POINTERS, constants, floats=("scale",), num_warps=config.prepare_warps
    )
    kinds = re.findall(
        r"griddepcontrol\.(wait|launch_dependents)|\b(st\.global|ld\.global|prefetch)", kernel.asm["ptx"]
    )
    steps = [control or memory for control, memory in kinds]
    waited = len(steps) - steps[::-1].index("wait")  # (a row of padding waits elsewhere)
    before, after = steps[:waited], steps[waited:]
    print(f"before: {sorted(set(before))}; waits: {steps.count('wait')}; then {after[0]}")
    return 0 if {"st.global", "launch_dependents"}.isdisjoint(before) and after[0] == "launch_dependents" else 1


if __name__ == "__main__":
    sys.exit(main())
