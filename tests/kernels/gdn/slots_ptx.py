"""Compile the GDN slots kernel and SGLang's for sm_90 (no GPU needed) and compare their arithmetic.

    python -m tests.kernels.gdn.slots_ptx       # a line a case; exits with 1 where they differ

Not in a process whose Triton interprets.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

from mamba_mtp_kernels.gdn.slots import _slots_kernel, constants_for, default_config
from triton import JITFunction, compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..ptx import stored_values
from .stock import stock_module, stock_version

H, HV, K, V = 16, 32, 128, 128
FLOATS = {"scale", "softplus_beta", "softplus_threshold", "lower_bound"}
UNSPECIALISED = {"T", "nodes", "write_layout", "cache_steps"}


def ptx_of(kernel: JITFunction, pointers: dict[str, str], constants: dict[str, Any]) -> str:
    """One warp, three stages, as both launch it. Integers are divisible by 16 but for counts."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{pointers[name]}" if name in pointers else "i32"
            if name not in UNSPECIALISED:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "num_stages": 3}).asm["ptx"]


def ours(dtype: str, state: str, tree: bool, batch: int, sglang: tuple[int, ...]) -> str:
    pointers = dict.fromkeys(("q", "k", "v", "a", "b", "out"), dtype) | {"states": state}
    pointers |= dict.fromkeys(("A_log", "dt_bias"), "fp32")
    pointers |= dict.fromkeys(("read_slots", "write_slots", "parents"), "i32")
    config = default_config(batch=batch, dims=(K, V), layouts=False, hopper=True, sglang=sglang)
    constants: dict[str, Any] = constants_for(config, heads=(H, HV), dims=(K, V), tree=tree, layouts=False)
    constants |= {"state_layout": None} | ({} if tree else {"parents": None})
    return ptx_of(_slots_kernel, pointers, constants)


def stocks(kernel: JITFunction, dtype: str, state: str, tree: bool, block_v: int) -> str:
    pointers = dict.fromkeys(("q", "k", "v", "a", "b", "o"), dtype)
    pointers |= dict.fromkeys(("h0_source", "intermediate_states_buffer"), state)
    pointers |= dict.fromkeys(("A_log", "dt_bias"), "fp32")
    pointers |= dict.fromkeys(
        ("h0_indices", "cu_seqlens", "intermediate_state_indices", "retrieve_parent_token_ptr"), "i32"
    )
    constants: dict[str, Any] = {"NP2_T": 4, "B": 1, "H": H, "HV": HV, "K": K, "V": V, "BK": K, "BV": block_v}
    on = ("USE_INITIAL_STATE", "USE_QK_L2NORM_IN_KERNEL", "IS_VARLEN", "DISABLE_STATE_UPDATE")
    on += ("CACHE_INTERMEDIATE_STATES", "SPLIT_N_HV_GRID", "USE_GDC")
    off = ("IS_KDA", "USE_LOWER_BOUND", "CACHE_RING", "MATCH_CUTEDSL_DECODE", "ROUND_STATE_TO_BF16")
    constants |= dict.fromkeys(on, True) | dict.fromkeys(off, False)
    constants |= {"HAS_EAGLE_TREE_CUSTOM_ATTN_MASK": tree, "MAX_CACHE_LEN": 0}
    constants |= {"stride_retrieve_parent_token_seq": 4 * tree, "stride_retrieve_parent_token_token": 1 * tree}
    for ring in ("rawv", "rawk", "g", "beta"):
        constants |= {f"replayssm_{ring}": None, f"stride_{ring}_slot": 0}
    return ptx_of(kernel, pointers, constants if tree else constants | {"retrieve_parent_token_ptr": None})


def main() -> int:
    module = stock_module()
    version = stock_version(module)
    kernel = module.fused_sigmoid_gating_delta_rule_update_kernel
    wrong = 0
    for batch in (8, 128) if version >= (0, 5, 23) else (8,):
        for dtype, state, tree in (
            ("fp32", "fp32", False),
            ("bf16", "fp32", False),
            ("bf16", "bf16", False),
            ("fp32", "bf16", False),
            ("bf16", "fp32", True),
            ("bf16", "bf16", True),
        ):
            config = default_config(batch=batch, dims=(K, V), layouts=False, hopper=True, sglang=version)
            got = stored_values(ours(dtype, state, tree, batch, version))
            want = stored_values(stocks(kernel, dtype, state, tree, config.block_v))
            differ = sum(a != b for a, b in zip(got, want, strict=True))
            wrong += differ > 0 or not got
            shape = "tree" if tree else "chain"
            print(f"{dtype} inputs, {state} state, {shape}, {config.block_v} values a program: "
                  f"{differ} of {len(want)} stored values differ", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
