"""Registers, spills and shared memory of the common, conv1d and mamba2 kernels, compiled for sm_90 without a GPU.

    python -m tests.kernels.mamba2.compile_report [WORD ...]     # only lines that contain every word

Default launch shapes at real sizes. Exits with 1 if one of them spills more than a few registers: N = 32 at dstate 256
does (64 to 144 bytes), and a 16-bit state at batch 1 (16 bytes). A verify that is launched under a register limit
(verify_replay.default_tiling) is shown with and without; what it spills there is the limit's doing and no failure.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from mamba_mtp_kernels.common import tree as common_tree
from mamba_mtp_kernels.common import window as common_window
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.conv1d import fold as conv_fold
from mamba_mtp_kernels.conv1d import verify_replay as conv_verify
from mamba_mtp_kernels.mamba2 import fold as mamba2_fold
from mamba_mtp_kernels.mamba2 import verify_replay as mamba2_verify
from mamba_mtp_kernels.mamba2 import verify_slots as mamba2_slots
from mamba_mtp_kernels.mamba2.arguments import SlotsTiling, stock_tiling

from ..hopper import compiled, resources

TOLERATED_BYTES = 160
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compiled_resources(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int, stages: int, max_registers: int = 0
) -> dict[str, int]:
    """Compile one kernel; every argument that is neither pointer nor constant is an int32 divisible by 16."""
    kernel = compiled(kernel, pointers, constants, num_warps=warps, num_stages=stages, max_registers=max_registers)
    return resources(kernel)


def mamba2(
    heads: int,
    headdim: int,
    dstate: int,
    groups: int,
    nodes: int,
    window: int,
    state: str,
    model: str,
    batch: int,
    either: bool = False,
    tiling: mamba2_verify.Tiling | None = None,
    keeps_newest: bool = True,
) -> dict[str, int]:
    """keeps_newest: a fold leaves the newest tokens pending."""
    tiling = tiling or mamba2_verify.default_tiling(
        headdim=headdim, dstate=dstate, nodes=nodes, fold_threshold=window, batch=batch, nheads=heads
    )
    constants = mamba2_verify.constants_for(
        tiling,
        nodes=nodes,
        heads=heads,
        groups=groups,
        headdim=headdim,
        dstate=dstate,
        capacity=window + 2 * nodes,
        fold_threshold=window,
        fold_at_once=fold_at_once(nodes),
        state=DTYPES[state],
        either=either,
    )
    constants |= dict.fromkeys(("HAS_SCHEDULE", "HAS_D", "HAS_BIAS", "SOFTPLUS"), True)
    constants |= dict.fromkeys(("stride_A", "stride_D", "stride_bias", "stride_dt_head"), 1)
    pointers = dict.fromkeys(("x", "dt", "B", "C", "y", "window_x", "window_B"), model)
    pointers |= dict.fromkeys(("A", "D", "dt_bias", "window_dt"), "fp32")
    pointers |= dict.fromkeys(("slots", "rows", "pending", "order", "schedule"), "i32")
    pointers |= {"checkpoint": state, "ancestors": "i64"}
    give_axis_order(pointers, constants, either)
    give_newest(pointers, constants, keeps_newest)
    kernel = mamba2_verify._mamba2_verify_kernel
    used = compiled_resources(kernel, pointers, constants, tiling.num_warps, tiling.num_stages)
    if tiling.max_registers:
        limited = compiled_resources(
            kernel, pointers, constants, tiling.num_warps, tiling.num_stages, tiling.max_registers
        )
        used |= {"limit": limited["registers"], "spilled under it": limited["spilled"]}
    return used


def give_axis_order(pointers: dict[str, str], constants: dict[str, Any], either: bool) -> None:
    if either:
        pointers["axis_order"] = "u8"
    else:
        constants["axis_order"] = None


def give_newest(pointers: dict[str, str], constants: dict[str, Any], keeps_newest: bool) -> None:
    if keeps_newest:
        pointers["newest"] = "i32"
    else:
        constants["newest"] = None


def slots(
    heads: int,
    headdim: int,
    dstate: int,
    groups: int,
    state: str,
    tree: bool,
    either: bool,
    tiling: SlotsTiling | None = None,
) -> dict[str, int]:
    tiling = tiling or stock_tiling(dstate)
    constants = {
        "HEADS": heads,
        "HEADS_PER_GROUP": heads // groups,
        "HEADDIM": headdim,
        "DSTATE": dstate,
        "TREE": tree,
        "EITHER": either,
        "SOFTPLUS": True,
        "BLOCK_P": tiling.block_p,
        "BLOCK_S": triton.next_power_of_2(dstate),
        **dict.fromkeys(("stride_A", "stride_D", "stride_bias", "stride_dt_head"), 1),
    }
    pointers = dict.fromkeys(("x", "dt", "B", "C", "y"), "bf16") | dict.fromkeys(("A", "D", "dt_bias"), "fp32")
    pointers |= dict.fromkeys(("read_slots", "write_slots"), "i32") | {"states": state}
    if tree:
        pointers["parents"] = "i32"
    else:
        constants["parents"] = None
    give_axis_order(pointers, constants, either)
    return compiled_resources(mamba2_slots._mamba2_slots_kernel, pointers, constants, tiling.num_warps, 3)


def fold(
    heads: int, headdim: int, dstate: int, groups: int, state: str, either: bool = False, model: str = "bf16"
) -> dict[str, int]:
    constants = mamba2_fold.constants_for(
        heads=heads, groups=groups, headdim=headdim, dstate=dstate, capacity=32, state=DTYPES[state], either=either
    )
    pointers = dict.fromkeys(("order", "src_slots", "dst_slots", "rows", "counts"), "i32")
    pointers |= {"states": state, "window_x": model, "window_B": model, "window_dt": "fp32", "A": "fp32"}
    give_axis_order(pointers, constants, either)
    return compiled_resources(mamba2_fold._mamba2_fold_kernel, pointers, constants, 1, 1)


def conv(dim: int, width: int, nodes: int, per_program: int) -> dict[str, int]:
    constants = {"DIM": dim, "N": nodes, "K": width, "NODES": per_program, "BLOCK_D": 512}
    constants |= {"HAS_BIAS": True, "SILU": True, "CHAIN": False, "PLACES": True, "WORDS": True}
    constants |= {"stride_tok": 1}
    pointers = dict.fromkeys(("x", "y", "conv_states", "weight", "bias", "window_inputs"), "bf16")
    pointers |= dict.fromkeys(("slots", "rows", "parents", "pending", "order"), "i32")
    return compiled_resources(conv_verify._conv1d_verify_kernel, pointers, constants, 2, 2)


def conv_folds(dim: int, width: int, in_commit: bool, keeps_newest: bool = True) -> dict[str, int]:
    constants = {"DIM": dim, "K": width, "BLOCK_D": 256, "BLOCK_W": 4, "stride_tok": 1}
    pointers = dict.fromkeys(("conv_states", "inputs"), "bf16")
    pointers |= dict.fromkeys(("order", "pending", "src_slots", "dst_slots", "rows"), "i32")
    if in_commit:
        constants["counts"] = None
    else:
        pointers["counts"] = "i32"
    give_newest(pointers, constants, keeps_newest)
    return compiled_resources(conv_fold._fold_conv_kernel, pointers, constants, 4, 2)


def tree(nodes: int) -> dict[str, int]:
    constants = {"N": nodes, "BLOCK_N": nodes, "HAS_LINKS": True}
    pointers = {"parents": "i32", "ancestors": "i64", "next_token": "i64", "next_sibling": "i64"}
    return compiled_resources(common_tree._build_tree_kernel, pointers, constants, 1, 2)


def commit(nodes: int, capacity: int, keeps_newest: bool = True) -> dict[str, int]:
    constants = {"C": capacity, "N": nodes, "BLOCK_C": capacity, "BLOCK_N": nodes, "HAS_TRACK": True}
    names = ["pending", "window_row", "order", "slots", "rows", "last_correct", "steps_to_track", "parents"]
    pointers = dict.fromkeys([*names, "track_count"], "i32")
    if keeps_newest:
        pointers |= dict.fromkeys(("newest", "length", "lengths"), "i32")
    else:
        constants |= dict.fromkeys(("newest", "length", "lengths"))
    return compiled_resources(common_window._commit_window_kernel, pointers, constants, 1, 2)


def cases() -> dict[str, tuple]:
    nemotron, small, wide = (128, 80, 128, 8), (64, 64, 128, 8), (48, 64, 256, 1)
    found: dict[str, tuple] = {}
    for name, heads in (
        ("128x80x128", nemotron),
        ("64x64x128", small),
        ("48x64x256", wide),
        ("96x128x128", (96, 128, 128, 8)),
    ):
        for nodes, window in ((4, 16), (8, 16), (8, 0), (8, 32), (16, 16), (32, 32)):
            for state, model in (("fp32", "bf16"), ("bf16", "bf16")):
                for batch in (64, 1):
                    key = f"mamba2_verify {name} N={nodes} W={window} {state} state {model} inputs batch {batch}"
                    found[key] = (mamba2, *heads, nodes, window, state, model, batch)
                    found[f"{key} either order"] = (mamba2, *heads, nodes, window, state, model, batch, True)
                    found[f"{key} folds all"] = (mamba2, *heads, nodes, window, state, model, batch, False, None, False)
        for state in ("fp32", "bf16"):
            found[f"mamba2_fold {name} {state} state"] = (fold, *heads, state)
            found[f"mamba2_fold {name} {state} state either order"] = (fold, *heads, state, True)
            for tree, shape in ((False, "chain"), (True, "tree")):
                key = f"mamba2_slots {name} {shape} {state} state"
                found[key] = (slots, *heads, state, tree, False)
                found[f"{key} either order"] = (slots, *heads, state, tree, True)
                found[f"{key} as 0.5.17"] = (slots, *heads, state, tree, False, stock_tiling(heads[2], (0, 5, 17)))
    for nodes, per_program in ((4, 4), (8, 4), (8, 1), (16, 4)):
        found[f"conv1d_verify 8192 K=4 N={nodes} {per_program} a program"] = (conv, 8192, 4, nodes, per_program)
    found["fold_conv 8192 K=4"] = (conv_folds, 8192, 4, False)
    found["commit_conv 8192 K=4"] = (conv_folds, 8192, 4, True)
    found["commit_conv 8192 K=4 folds all"] = (conv_folds, 8192, 4, True, False)
    found["build_tree N=8"] = (tree, 8)
    found["build_tree N=64"] = (tree, 64)
    found["commit_window N=8"] = (commit, 8, 32)
    found["commit_window N=8 folds all"] = (commit, 8, 32, False)
    return found


def main() -> None:
    spilled = 0
    for label, (report, *arguments) in cases().items():
        if all(word in label for word in sys.argv[1:]):
            used = report(*arguments)
            spilled += used["spilled"] > TOLERATED_BYTES
            print(f"{label:88s} " + " ".join(f"{name} {value}" for name, value in used.items()), flush=True)
    sys.exit(1 if spilled else 0)


if __name__ == "__main__":
    main()
