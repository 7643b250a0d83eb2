"""Registers, spills and shared memory of the Mamba2 kernels, compiled for sm_90 without a GPU. Those that both families
share are in tests/bench/compile_targets.py.

    python -m tests.kernels.mamba2.compile_report [WORD ...]     # only lines that contain every word

Default launch shapes at real sizes. Exits with 1 if one of them spills more than a few registers: N = 32 at dstate 256
does (64 to 144 bytes). A verify that is launched under a register limit
(verify_replay.default_tiling) is shown with and without; what it spills there is the limit's doing and no failure.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.mamba2 import fold as mamba2_fold
from mamba_mtp_kernels.mamba2 import scores as mamba2_scores
from mamba_mtp_kernels.mamba2 import verify_replay as mamba2_verify
from mamba_mtp_kernels.mamba2 import verify_slots as mamba2_slots
from mamba_mtp_kernels.mamba2.arguments import SlotsTiling, stock_tiling

from ..hopper import compiled, has_dependent_launch, resources

TOLERATED_BYTES = 160
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compiled_resources(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int, stages: int, max_registers: int = 0
) -> dict[str, int]:
    """Compile one kernel; every argument that is neither pointer nor constant is an int32 divisible by 16."""
    kernel = compiled(kernel, pointers, constants, num_warps=warps, num_stages=stages, max_registers=max_registers)
    return resources(kernel)


def verify_arguments(
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
) -> tuple[dict[str, str], dict[str, Any], mamba2_verify.Tiling]:
    """Pointers, constants and launch shape of a verify; pointers and constants are those of its scores' kernel too."""
    tiling = tiling or mamba2_verify.default_tiling(
        headdim=headdim,
        dstate=dstate,
        nodes=nodes,
        fold_threshold=window,
        batch=batch,
        nheads=heads,
        narrow=DTYPES[state].itemsize == 2,
    )
    constants: dict[str, Any] = mamba2_verify.constants_for(
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
    constants |= mamba2_verify.stream_constants(
        tiling, nodes=nodes, dstate=dstate, fold_threshold=window, fold_at_once=fold_at_once(nodes)
    )
    if not mamba2_verify.makes_scores_once(tiling, nodes, batch * heads):
        constants["scores"] = None
    constants |= dict.fromkeys(("HAS_SCHEDULE", "HAS_D", "HAS_BIAS", "SOFTPLUS"), True)
    constants["OVERLAP"] = has_dependent_launch()
    constants |= dict.fromkeys(("stride_A", "stride_D", "stride_bias", "stride_dt_head"), 1)
    constants |= {"GROUPS": groups, "TOKENS": mamba2_scores.PROGRAM_TOKENS}
    pointers = dict.fromkeys(("dt", "C", "y", "window_x", "window_B"), model)
    pointers |= dict.fromkeys(("A", "D", "dt_bias", "window_dt", "scores"), "fp32")
    pointers |= dict.fromkeys(("plan", "order", "schedule"), "i32")
    pointers |= {"checkpoint": state, "ancestors": "i64"}
    give_axis_order(pointers, constants, either)
    return pointers, constants, tiling


def verify_kernel(tiling: mamba2_verify.Tiling, constants: dict[str, Any]) -> Any:
    """Which kernel is launched so."""
    if mamba2_verify.is_for_a_block(tiling, constants["N"], constants["MORE"]):
        return mamba2_verify.mamba2_verify_block_kernel
    return mamba2_verify._mamba2_verify_kernel


def mamba2(*sizes: Any) -> dict[str, int]:
    """Of a verify; sizes: as `verify_arguments` takes them."""
    pointers, constants, tiling = verify_arguments(*sizes)
    kernel = verify_kernel(tiling, constants)
    used = compiled_resources(kernel, pointers, constants, tiling.num_warps, tiling.num_stages)
    if tiling.max_registers:
        limited = compiled_resources(
            kernel, pointers, constants, tiling.num_warps, tiling.num_stages, tiling.max_registers
        )
        used |= {"limit": limited["registers"], "spilled under it": limited["spilled"]}
    return used


def scores(*sizes: Any) -> dict[str, int]:
    """Of the kernel of a verify's scores."""
    pointers, constants, _ = verify_arguments(*sizes)
    constants.pop("scores", None)  # a verify of so many heads may make its own
    return compiled_resources(mamba2_scores._mamba2_scores_kernel, pointers, constants, 1, 3)


def give_axis_order(pointers: dict[str, str], constants: dict[str, Any], either: bool) -> None:
    if either:
        pointers["axis_order"] = "u8"
    else:
        constants["axis_order"] = None


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


def cases() -> dict[str, tuple]:
    nemotron, small, wide = (128, 80, 128, 8), (64, 64, 128, 8), (48, 64, 256, 1)
    found: dict[str, tuple] = {}
    for name, heads in (
        ("128x80x128", nemotron),
        ("64x64x128", small),
        ("48x64x256", wide),
        ("96x128x128", (96, 128, 128, 8)),
    ):
        for nodes, window in ((4, 16), (8, 16), (8, 0), (8, 32), (16, 16), (16, 20), (32, 32)):
            for state, model in (("fp32", "bf16"), ("bf16", "bf16")):
                for batch in (64, 1):
                    key = f"mamba2_verify {name} N={nodes} W={window} {state} state {model} inputs batch {batch}"
                    found[key] = (mamba2, *heads, nodes, window, state, model, batch)
                    found[f"{key} either order"] = (mamba2, *heads, nodes, window, state, model, batch, True)
                key = f"mamba2_scores {name} N={nodes} W={window} {state} state {model} inputs"
                found[key] = (scores, *heads, nodes, window, state, model, 64)
        for state in ("fp32", "bf16"):
            found[f"mamba2_fold {name} {state} state"] = (fold, *heads, state)
            found[f"mamba2_fold {name} {state} state either order"] = (fold, *heads, state, True)
            for tree, shape in ((False, "chain"), (True, "tree")):
                key = f"mamba2_slots {name} {shape} {state} state"
                found[key] = (slots, *heads, state, tree, False)
                found[f"{key} either order"] = (slots, *heads, state, tree, True)
                found[f"{key} as 0.5.17"] = (slots, *heads, state, tree, False, stock_tiling(heads[2], (0, 5, 17)))
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
