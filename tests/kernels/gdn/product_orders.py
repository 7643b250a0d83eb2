"""Compile verify and fold for sm_90 (no GPU needed) and show in which order their products sum columns.

    python -m tests.kernels.gdn.product_orders      # a line a kernel; exits with 1 unless all take one order

Of float32 factors the compiler chooses that order (kWidth) by the narrowest load it finds behind them. A fold in a
loop, a fold without one and a verify that only reads find different ones. A state of float16 beside such keys would be
summed in another order again if it were taken as it lies: no verify may.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.gdn import fold as fold_module
from mamba_mtp_kernels.gdn import verify_replay as verify_module

from ..hopper import compiled

HEADS, DIMS = (1, 1), (32, 16)
"""(H, HV) and (K, V)."""
POINTERS = {
    **dict.fromkeys(("window_k", "window_v", "out", "carried", "weights", "fold_factors"), "fp32"),
    **dict.fromkeys(("window_g", "window_beta"), "fp32"),
    **dict.fromkeys(("slots", "pending", "newest", "order", "schedule"), "i32"),
    **dict.fromkeys(("src_slots", "dst_slots", "counts", "rows"), "i32"),
    "states": "bf16", "axis_order": "u8",
}  # fmt: skip


def orders(kernel: Any) -> set[int]:
    """kWidth of every product of float32 factors."""
    factors = re.findall(r"tt\.dot .* : tensor<\w+xf32, #ttg\.dot_op<[^>]*kWidth = (\d+)", kernel.asm["ttgir"])
    assert factors, "no product of float32 factors in the kernel"
    return {int(width) for width in factors}


def halves(kernel: Any) -> int:
    """How many products have two factors of float16."""
    return len(re.findall(r"tt\.dot .* : tensor<\w+xf16, .* \* tensor<\w+xf16", kernel.asm["ttgir"]))


def verify(nodes: int, window: int, kind: str = "fp32", state: torch.dtype = torch.bfloat16) -> Any:
    config = verify_module.default_config(nodes=nodes, values=DIMS[1], exact=True, fold_threshold=window, narrow=True)
    _, constants = verify_module.constants_for(
        config, nodes=nodes, heads=HEADS, dims=DIMS, fold_threshold=window, fold_at_once=fold_at_once(nodes),
        state=state,
    )  # fmt: skip
    return compiled(verify_module._verify_kernel, pointers(kind, state), constants, num_warps=config.num_warps)


def pointers(kind: str, state: torch.dtype) -> dict[str, str]:
    """kind: of keys, values and outputs."""
    states = {"states": "fp16" if state == torch.float16 else "bf16"}
    return POINTERS | dict.fromkeys(("window_k", "window_v", "out"), kind) | states


def main() -> int:
    constants = fold_module.constants_for(heads=HEADS, dims=DIMS, state=torch.bfloat16)
    kernels = {
        "fold": compiled(fold_module._fold_kernel, POINTERS, constants, num_warps=fold_module.WARPS, num_stages=1),
        "verify, fold of one step": verify(4, 8),
        "verify, fold of two steps": verify(17, 3),
    }
    found = {name: orders(kernel) for name, kernel in kernels.items()}
    for name, widths in found.items():
        print(f"{name}: kWidth {', '.join(map(str, sorted(widths)))}", flush=True)
    of_halves = halves(verify(4, 8, "fp16", torch.float16))
    print(f"verify of float16: {of_halves} products of it as it lies", flush=True)
    return int(len(set.union(*found.values())) != 1 or of_halves > 0)


if __name__ == "__main__":
    sys.exit(main())
