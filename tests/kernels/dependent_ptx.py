"""Compile for sm_90 (no GPU needed) the kernels that may start while the one before them runs, and show what they do
before that has ended.

    python -m tests.kernels.dependent_ptx      # exits with 1 where a kernel does more than it may

Nothing may be written by then, for outputs may lie where a tensor was that a kernel before still reads. prepare and
verify may look up and ask for memory: the convolution writes nothing of that. Whatever comes before a convolution may
write all it looks at. Who lets the next kernel go: the convolution and prepare once they have waited; prepare by
products at once, since verify touches nothing of theirs before it has waited itself.
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


def gdn(products: bool, kernel: int) -> Any:
    """kernel: 0 is the first one of a verify, 1 the second."""
    config = verify_module.default_config(
        nodes=NODES, values=DIMS[1], exact=False, fold_threshold=THRESHOLD, overlap=True, products=products
    )
    constants = verify_module.constants_for(
        config, nodes=NODES, heads=HEADS, dims=DIMS, fold_threshold=THRESHOLD, fold_at_once=fold_at_once(NODES),
        state=torch.float32,
    )[kernel]  # fmt: skip
    pointers = {
        **dict.fromkeys(("q", "a", "b", "A_log", "dt_bias", "window_k", "window_v", "carried", "out"), "bf16"),
        **dict.fromkeys(("window_g", "window_beta", "window_factors", "weights", "fold_factors", "states"), "fp32"),
        **dict.fromkeys(("slots", "rows", "schedule", "pending", "newest", "order"), "i32"), "ancestors": "i64",
    }  # fmt: skip
    first = verify_module.prepare_products_kernel if products else verify_module.prepare_kernel
    chosen, warps = (first, config.prepare_warps) if kernel == 0 else (verify_module._verify_kernel, config.num_warps)
    return compiled(chosen, pointers, constants | {"axis_order": None}, floats=("scale",), num_warps=warps)


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


def steps(kernel: Any) -> list[str]:
    """What it does to global memory and to other kernels, in the order of its text."""
    kinds = re.findall(
        r"griddepcontrol\.(wait|launch_dependents)|\b(st\.global|ld\.global|prefetch)", kernel.asm["ptx"]
    )
    return [control or memory for control, memory in kinds]


def main() -> int:
    looks_up = {"ld.global", "prefetch"}
    # (padding waits first in both kernels of a verify; then each branch of theirs does)
    kernels = {
        "prepare": (gdn(False, 0), looks_up, -1),
        "prepare by products": (gdn(True, 0), looks_up | {"launch_dependents"}, 1),
        "verify": (gdn(False, 1), looks_up, 0),
        "convolution": (convolve(), set(), -1),
    }
    wrong = False
    for name, (kernel, allowed, first_branch) in kernels.items():
        taken = steps(kernel)
        waits = [i for i, step in enumerate(taken) if step == "wait"]
        before = set(taken[: waits[first_branch]]) - {"wait"}
        print(f"{name}: {' '.join(sorted(before))}; waits: {len(waits)}")
        wrong |= not before <= allowed
        wrong |= name in ("prepare", "convolution") and taken[waits[-1] + 1] != "launch_dependents"
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
