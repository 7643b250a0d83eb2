"""Registers, spills and shared memory of the GDN kernels, compiled for sm_90 without a GPU.

    python -m tests.bench.compile_report [--nodes 4 8 16] [--window 8 16] [--state fp32 bf16] [--config k=v,...]

Qwen3-Next heads (H 16, HV 32, K = V = 128). Exits with 1 if a default configuration spills.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from mamba_mtp_kernels.common.operands import fold_at_once
from mamba_mtp_kernels.gdn import fold as fold_module
from mamba_mtp_kernels.gdn import verify_replay as verify_module
from mamba_mtp_kernels.gdn import verify_slots as slots_module
from mamba_mtp_kernels.gdn.prepare_products import small_enough

from tests.kernels.hopper import compiled, resources

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
H, HV, K, V = 16, 32, 128, 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def instructions(cubin: bytes) -> dict[str, int]:
    """How many of some kinds a cubin has, by cuobjdump; spill_ops are local loads and stores."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run(
            [TOOLS / "cuobjdump", "-sass", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = {"spill_ops": len(re.findall(r"\b(?:LDL|STL)\b", sass))}
    found["instructions"] = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    for name in ("HMMA", "LDGSTS", "LDS", "STS", "SHFL", "BAR", "LDG.E.128"):
        found[name] = len(re.findall(rf"\b{re.escape(name)}", sass))
    return found


def report(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    maxnreg: int | None = None,
    num_stages: int = 3,
) -> dict[str, int]:
    """Of a kernel, compiled as the launcher would with these pointer types; all strides and pointers 16-aligned."""
    found = compiled(
        kernel,
        pointers,
        constants,
        floats=("scale",),
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=maxnreg or 0,
    )
    return {**resources(found), **instructions(found.asm["cubin"])}


WINDOW_POINTERS = {
    "window_k": "bf16", "window_v": "bf16", "window_g": "fp32", "window_beta": "fp32", "window_factors": "fp32",
    "order": "i32",
}  # fmt: skip


def verify_reports(
    nodes: int,
    window: int,
    state: str,
    config: verify_module.VerifyConfig,
    either: bool = False,
    keeps_newest: bool = True,
) -> tuple[Callable[[], dict[str, int]], Callable[[], dict[str, int]]]:
    """Of prepare_kernel and of the verify kernel, compiled when called. keeps_newest: a fold leaves the newest tokens
    pending."""
    pointers = {
        **WINDOW_POINTERS, **dict.fromkeys(("q", "a", "b", "out", "dt_bias"), "bf16"), "A_log": "fp32",
        "states": state, "slots": "i32", "rows": "i64", "pending": "i32", "ancestors": "i64",
        "carried": "bf16" if config.split else "fp32", "weights": "fp32",
        "fold_factors": "fp32", "axis_order": "u8", "newest": "i32", "schedule": "i32",
    }  # fmt: skip
    prepare, verify = verify_module.constants_for(
        config,
        nodes=nodes,
        heads=(H, HV),
        dims=(K, V),
        fold_threshold=window,
        fold_at_once=fold_at_once(nodes),
        state=DTYPES[state],
        either=either,
    )
    if not keeps_newest:
        prepare, verify = ({**constants, "newest": None} for constants in (prepare, verify))
    first = verify_module.prepare_products_kernel if config.products else verify_module.prepare_kernel
    kernels = first, verify_module._verify_kernel
    return (
        functools.partial(report, kernels[0], pointers, prepare, config.prepare_warps, config.prepare_registers),
        functools.partial(report, kernels[1], pointers, verify, config.num_warps, config.registers, config.num_stages),
    )


def fold_report(state: str, either: bool) -> dict[str, int]:
    pointers = {
        **WINDOW_POINTERS, "states": state, "src_slots": "i32", "dst_slots": "i32", "rows": "i32",
        "counts": "i32", "axis_order": "u8",
    }  # fmt: skip
    constants = fold_module.constants_for(heads=(H, HV), dims=(K, V), state=DTYPES[state], either=either)
    return report(fold_module._fold_kernel, pointers, constants, fold_module.WARPS, num_stages=1)


def slots_report(state: str, batch: int, tree: bool, either: bool, hopper: bool = True) -> dict[str, int]:
    pointers = {
        **dict.fromkeys(("q", "k", "v", "a", "b", "out", "dt_bias"), "bf16"), "A_log": "fp32",
        "states": state, "axis_order": "u8", "read_slots": "i32", "write_slots": "i32",
        "parents": "i32",
    }  # fmt: skip
    config = slots_module.default_config(batch=batch, dims=(K, V), either=either, hopper=hopper)
    constants = slots_module.constants_for(config, heads=(H, HV), dims=(K, V), tree=tree, either=either)
    return report(slots_module._slots_kernel, pointers, constants, 1)


def show(name: str, found: dict[str, int]) -> None:
    print(f"{name:64s} " + " ".join(f"{key}={value}" for key, value in found.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--window", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--state", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--config", nargs="*", default=[], help="field=value of VerifyConfig, changed from the default")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    changes = {key: int(value) for key, value in (item.split("=") for item in args.config)}
    spilled = 0

    def show_all(name: str, reports: dict[str, dict[str, int]]) -> None:
        nonlocal spilled
        for kernel, found in reports.items():
            spilled += found["spill_ops"]
            show(f"{kernel} {name}", found)

    for state, either in itertools.product(args.state, (False, True)):
        where = f"state={state} {'either order' if either else 'VK'}"
        for nodes, window, keeps_newest in itertools.product(args.nodes, args.window, (False, True)):
            config = verify_module.default_config(
                nodes=nodes,
                values=V,
                exact=False,
                fold_threshold=window,
                heads=args.batch * HV,
                narrow=state != "fp32",
                overlap=True,
                products=small_enough(nodes, window),
            )
            config = replace(config, **changes)
            prepare, verify = verify_reports(nodes, window, state, config, either, keeps_newest)
            kept = " newest stay" if keeps_newest else ""
            show_all(f"N={nodes} W={window} {where}{kept} {changes}", {"prepare": prepare(), "verify": verify()})
        show_all(where, {"fold": fold_report(state, either)})
        for batch, tree in itertools.product((64, 65), (False, True)):
            name = f"{'tree' if tree else 'chain'} batch={batch} {where}"
            show_all(name, {"slots": slots_report(state, batch, tree, either)})
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
