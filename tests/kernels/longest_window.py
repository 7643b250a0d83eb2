"""Whether a family's longest window fits: its verify of 64 nodes, compiled for sm_90 (no GPU needed).

python -m tests.kernels.longest_window gdn 256       # a line a model: bytes of shared memory; exits with 1 past 227 KiB
"""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
from mamba_mtp_kernels.common.operands import MAX_NODES, fold_at_once
from mamba_mtp_kernels.gdn import verify_replay

from .hopper import compiled
from .mamba2.compile_report import mamba2

SHARED = 227 * 1024
"""Bytes a block may have on Hopper."""

MAMBA2 = {"Nemotron-H": (128, 64, 128, 8), "Falcon-H1": (32, 64, 256, 1)}
"""Heads, head dimension, state dimension, groups."""

BATCH = 64


def gdn_shared(window: int) -> int:
    """Qwen3-Next's heads."""
    heads, dims = (16, 32), (128, 128)
    config = verify_replay.default_config(
        nodes=MAX_NODES, values=dims[1], exact=False, fold_threshold=window, heads=BATCH * heads[1]
    )
    _, constants = verify_replay.constants_for(
        config,
        nodes=MAX_NODES,
        heads=heads,
        dims=dims,
        fold_threshold=window,
        fold_at_once=fold_at_once(MAX_NODES),
        state=torch.float32,
        either=True,
    )
    pointers = dict.fromkeys(("out", "window_k", "window_v", "carried"), "bf16")
    pointers |= dict.fromkeys(("states", "weights", "fold_factors"), "fp32")
    pointers |= dict.fromkeys(("slots", "rows", "schedule", "pending", "newest", "order"), "i32") | {"axis_order": "u8"}
    kernel = verify_replay._verify_kernel
    return int(compiled(kernel, pointers, constants, num_warps=config.num_warps).metadata.shared)


def shared(family: str, window: int) -> dict[str, int]:
    """By model of the family."""
    if family == "gdn":
        return {"Qwen3-Next": gdn_shared(window)}
    return {
        name: mamba2(*sizes, MAX_NODES, window, "fp32", "bf16", BATCH, True)["shared"] for name, sizes in MAMBA2.items()
    }


def main(family: str, window: str) -> int:
    found = shared(family, int(window))
    for name, size in found.items():
        print(f"{name}, window {window}, {MAX_NODES} nodes: {size} bytes of shared memory, {SHARED} there are")
    return int(max(found.values()) > SHARED)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
