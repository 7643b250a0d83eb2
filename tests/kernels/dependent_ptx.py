"""Compile for sm_90 (no GPU needed) the kernels that may start while the one before them runs, and show what they do
before that has ended.

    python -m tests.kernels.dependent_ptx      # exits with 1 where a kernel does more than it may

Nothing may be written by then, for outputs may lie where a tensor was that the kernel before still reads; and the next
kernel may not be let go. prepare may look up and ask for memory: the convolution writes nothing of that. Whatever comes
before a convolution may write all it looks at.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.conv1d import verify_replay as convolution
from mamba_mtp_kernels.gdn import verify_replay as verify_module

from .hopper import compiled

NODES, THRESHOLD, HEADS, DIMS = 4, 12, (2, 4), (32, 16)
"""HEADS (H, HV), DIMS (K, V)."""


def prepare() -> Any:
    config = verify_module.default_config(
        nodes=NODES, values=DIMS[1], exact=False, fold_threshold=THRESHOLD, overlap=True
    )
    constants, _ = verify_module.constants_for(
        config, nodes=NODES, heads=HEADS, dims=DIMS, fold_threshold=THRESHOLD, fold_at_once=fold_at_once(NODES),
        state=torch.float32,
    )  # fmt: skip
    pointers = {
        **dict.fromkeys(("q", "a", "b", "A_log", "dt_bias", "window_k", "carried"), "bf16"),
        **dict.fromkeys(("window_g", "window_beta", "window_factors", "weights", "fold_factors"), "fp32"),
        **dict.fromkeys(("slots", "rows", "pending", "newest", "order"), "i32"), "ancestors": "i64",
    }  # fmt: skip
    return compiled(
        verify_module.prepare_kernel, pointers, constants, floats=("scale",), num_warps=config.prepare_warps
    )


def convolve() -> Any:
    constants = {
        "WIDTH_0": 256, "WIDTH_1": 0, "WIDTH_2": 0, "RESULT": 0, "N": NODES, "K": 4, "NODES": NODES, "BLOCK_D": 256,
        "SILU": True, "CHAIN": True, "PLACES": True, "WORDS": True, "HAS_BIAS": False, "bias": None,
        "first_kept": None, "second_kept": None, "OVERLAP": True,
    }  # fmt: skip
    pointers = {
        **dict.fromkeys(("x", "y", "conv_states", "weight", "window_inputs"), "bf16"),
        **dict.fromkeys(("slots", "rows", "parents", "pending", "order"), "i32"),
    }
    return compiled(convolution._conv1d_verify_kernel, pointers, constants, num_warps=2)


def around_the_wait(kernel: Any) -> tuple[list[str], list[str], int]:
    """What it does to global memory and to other kernels up to its last wait and after it, and how often it waits."""
    kinds = re.findall(
        r"griddepcontrol\.(wait|launch_dependents)|\b(st\.global|ld\.global|prefetch)", kernel.asm["ptx"]
    )
    steps = [control or memory for control, memory in kinds]
    waited = len(steps) - steps[::-1].index("wait")  # (a row of padding waits elsewhere)
    return steps[:waited], steps[waited:], steps.count("wait")


def main() -> int:
    allowed = {"prepare": {"wait", "ld.global", "prefetch"}, "convolution": {"wait"}}
    wrong = False
    for name, kernel in (("prepare", prepare()), ("convolution", convolve())):
        before, after, waits = around_the_wait(kernel)
        print(f"{name}: before: {sorted(set(before))}; waits: {waits}; then {after[0]}")
        wrong |= not set(before) <= allowed[name] or after[0] != "launch_dependents"
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
