"""Compile for sm_90 (no GPU needed) the kernels that may start while the one before them runs, and show what they do
before that has ended.

    python -m tests.kernels.dependent_ptx      # exits with 1 where a kernel does more than it may

Nothing may be written by then, for outputs may lie where a tensor was that a kernel before still reads. prepare,
verify and Mamba2's scores may look up and ask for memory: the convolution writes nothing of that. Whatever comes before
a convolution, or before what is launched once a step, may write all it looks at. The convolution's half of a commit
alone does all it has to while the window's half runs: it has no argument that the latter writes, and writes to the
pool. Who lets the next kernel go: all others once they have waited; prepare by products at once, since verify touches
nothing of theirs before it has waited itself; a verify and the convolution's half of a commit nobody. Mamba2's scores
let its verify go when the convolution has ended: until they have, it may look at whatever the convolution wrote.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
from mamba_mtp_kernels.common import plan, tree, window
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.conv1d import fold as conv_fold
from mamba_mtp_kernels.conv1d import verify_replay as convolution
from mamba_mtp_kernels.gdn import verify_replay as verify_module
from mamba_mtp_kernels.mamba2 import scores as mamba2_scores
from mamba_mtp_kernels.mamba2 import verify_replay as mamba2_verify

from .hopper import compiled
from .mamba2.compile_report import verify_arguments

NODES, THRESHOLD, HEADS, DIMS = 4, 12, (2, 4), (32, 16)
"""HEADS (H, HV), DIMS (K, V)."""


def gdn(products: bool, kernel: int, nodes: int = NODES, keys: int = DIMS[0]) -> Any:
    """kernel: 0 is the first one of a verify, 1 the second. keys: K."""
    config = verify_module.default_config(
        nodes=nodes, values=DIMS[1], exact=False, fold_threshold=THRESHOLD, overlap=True, products=products
    )
    constants = verify_module.constants_for(
        config, nodes=nodes, heads=HEADS, dims=(keys, DIMS[1]), fold_threshold=THRESHOLD,
        fold_at_once=fold_at_once(nodes), state=torch.float32,
    )[kernel]  # fmt: skip
    pointers = {
        **dict.fromkeys(("q", "a", "b", "A_log", "dt_bias", "window_k", "window_v", "carried", "out"), "bf16"),
        **dict.fromkeys(("window_g", "window_beta", "window_factors", "weights", "fold_factors", "states"), "fp32"),
        **dict.fromkeys(("slots", "rows", "schedule", "pending", "newest", "order"), "i32"), "ancestors": "i64",
    }  # fmt: skip
    first = verify_module.prepare_products_kernel if products else verify_module.prepare_kernel
    chosen, warps = (first, config.prepare_warps) if kernel == 0 else (verify_module._verify_kernel, config.num_warps)
    return compiled(chosen, pointers, constants | {"axis_order": None}, floats=("scale",), num_warps=warps)


def mamba2(kernel: Any, batch: int, nodes: int = NODES) -> Any:
    """A verify, or the kernel of its scores. batch, nodes: decide who makes these."""
    pointers, constants, tiling = verify_arguments(4, 80, 32, 2, nodes, THRESHOLD, "fp32", "bf16", batch)
    return compiled(kernel, pointers, constants, num_warps=tiling.num_warps)


def convolve() -> Any:
    constants = {
        "WIDTH_0": 256, "WIDTH_1": 0, "WIDTH_2": 0, "RESULT": 0, "N": NODES, "K": 4, "NODES": NODES, "BLOCK_D": 256,
        "SILU": True, "CHAIN": True, "PLACES": True, "WORDS": True, "HAS_BIAS": False, "bias": None,
        "first_kept": None, "second_kept": None, "OVERLAP": True,
    }  # fmt: skip
    pointers = {
        **dict.fromkeys(("x", "y", "conv_states", "weight", "window_inputs"), "bf16"),
        **dict.fromkeys(("plan", "parents"), "i32"),
    }
    return compiled(convolution._conv1d_verify_kernel, pointers, constants, num_warps=2)


STEP_POINTERS = {
    **dict.fromkeys(("parents", "pending", "newest", "length", "window_row", "order", "slots", "rows"), "i32"),
    **dict.fromkeys(("lengths", "last_correct", "steps_to_track", "track_count", "schedule", "plan"), "i32"),
    **dict.fromkeys(("next_token", "next_sibling"), "i32"), "ancestors": "i64",
    **dict.fromkeys(("src_slots", "dst_slots", "counts"), "i32"), **dict.fromkeys(("conv_states", "inputs"), "bf16"),
}  # fmt: skip
STEP_CONSTANTS = {
    "N": NODES, "BLOCK_N": NODES, "C": 32, "BLOCK_C": 32, "PAGE": 1, "HAS_TRACK": True, "BLOCK_B": 32,
    "STAY": 12, "BLOCK_STAY": 16, "DIM": 512, "WORDS": True, "BESIDE": False, "K": 4, "BLOCK_D": 512, "OVERLAP": True,
}  # fmt: skip


BESIDE = {"BESIDE": True} | dict.fromkeys(("order", "src_slots", "dst_slots", "rows", "counts"))
"""The convolution's half of a commit, beside the window's."""


def once_a_step(kernel: Any, **constants: Any) -> Any:
    """One of the kernels around a step's layers."""
    return compiled(kernel, STEP_POINTERS, STEP_CONSTANTS | constants, num_warps=1)


OF_INTEREST = re.compile(r"griddepcontrol\.(wait|launch_dependents)|\b(st\.global|ld\.global|prefetch)")


def steps(ptx: str) -> Iterator[tuple[str, bool]]:
    """What a kernel does to global memory and to other kernels, and whether it has waited by then, whatever way."""
    blocks: dict[str, list[str]] = {"": []}
    for line in ptx[ptx.index("{") :].splitlines():
        if label := re.match(r"(\$\w+):", line):
            blocks[label[1]] = []
        else:
            # what follows a branch that may not be taken is a block of its own
            current = blocks[next(reversed(blocks))]
            current.append(line)
            if re.search(r"@%p\d+\s+bra", line):
                blocks[f"after {len(blocks)}"] = []
    names = list(blocks)
    goes_to: dict[str, list[str]] = {}
    for name, following in zip(names, [*names[1:], ""], strict=True):
        last = next((line for line in reversed(blocks[name]) if line.strip()), "")
        goes_to[name] = re.findall(r"\bbra(?:\.uni)?\s+(\$\w+)", last)
        if not re.search(r"^\s*(bra|ret)\b", last) and following:
            goes_to[name].append(following)
    # waited at the beginning of a block: on every way to it; all blocks but the first have until a way without is found
    waited = {name: name != "" for name in names}
    pending = [""]
    while pending:
        name = pending.pop()
        after = waited[name] or any("griddepcontrol.wait" in line for line in blocks[name])
        for other in goes_to[name]:
            if waited[other] and not after:
                waited[other] = False
                pending.append(other)
    for name in names:
        now = waited[name]
        for found in OF_INTEREST.finditer("\n".join(blocks[name])):
            yield found[1] or found[2], now
            now |= found[1] == "wait"


def main() -> int:
    looks_up = {"ld.global", "prefetch"}
    kernels = {
        "prepare": (gdn(False, 0), looks_up),
        "prepare by products": (gdn(True, 0), looks_up | {"launch_dependents"}),
        "prepare by products, two blocks": (gdn(True, 0, nodes=8), looks_up | {"launch_dependents"}),
        "prepare by products, in pieces": (gdn(True, 0, nodes=16, keys=64), looks_up | {"launch_dependents"}),
        "verify": (gdn(False, 1), looks_up),
        "mamba2 verify": (mamba2(mamba2_verify._mamba2_verify_kernel, 1024), looks_up),
        "mamba2 verify, own scores": (mamba2(mamba2_verify._mamba2_verify_kernel, 256, nodes=8), looks_up),
        "mamba2 verify, a block a program": (mamba2(mamba2_verify.mamba2_verify_block_kernel, 1), looks_up),
        "mamba2 scores": (mamba2(mamba2_scores._mamba2_scores_kernel, 1024), looks_up),
        "convolution": (convolve(), set()),
        "draft trees": (once_a_step(tree._build_tree_kernel), set()),
        "plan": (once_a_step(plan._plan_rows_kernel), set()),
        "commit": (once_a_step(window._commit_window_kernel), set()),
        "fold of the convolution": (once_a_step(conv_fold._fold_conv_kernel, plan=None), set()),
        "beside the commit": (once_a_step(conv_fold._fold_conv_kernel, **BESIDE), {"ld.global", "st.global"}),
    }
    wrong = False
    for name, (kernel, allowed) in kernels.items():
        taken = list(steps(kernel.asm["ptx"]))
        before = {step for step, waited in taken if not waited}
        print(
            f"{name}: {' '.join(sorted(before))}; then {' '.join(sorted({step for step, waited in taken if waited}))}"
        )
        wrong |= not before - {"wait"} <= allowed
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
