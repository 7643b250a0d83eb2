"""Compile the GDN slots kernel and SGLang's for sm_90 (no GPU needed) and compare their arithmetic.

python -m tests.kernels.gdn.slots_ptx       # a line a case; exits with 1 where they differ
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

from mamba_mtp_kernels.gdn.verify_slots import _slots_kernel, constants_for, default_config

from ..hopper import compiled, same_arithmetic
from .stock import stock_module, stock_version

H, HV, K, V = 16, 32, 128, 128
LAUNCH: dict[str, Any] = {
    "floats": ("scale", "softplus_beta", "softplus_threshold", "lower_bound"),
    "unspecialised": ("T", "nodes", "write", "cache_steps"),
    "num_warps": 1,
}


def ours(dtype: str, state: str, tree: bool, batch: int, sglang: tuple[int, ...]) -> Any:
    pointers = dict.fromkeys(("q", "k", "v", "a", "b", "out"), dtype) | {"states": state}
    pointers |= dict.fromkeys(("A_log", "dt_bias"), "fp32")
    pointers |= dict.fromkeys(("read_slots", "write_slots", "parents"), "i32")
    config = default_config(batch=batch, dims=(K, V), either=False, hopper=True, sglang=sglang)
    constants: dict[str, Any] = constants_for(config, heads=(H, HV), dims=(K, V), tree=tree, either=False)
    constants |= {"axis_order": None} | ({} if tree else {"parents": None})
    return compiled(_slots_kernel, pointers, constants, **LAUNCH)


def stocks(kernel: Any, dtype: str, state: str, tree: bool, block_v: int) -> Any:
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
    constants |= {} if tree else {"retrieve_parent_token_ptr": None}
    return compiled(kernel, pointers, constants, **LAUNCH)


def main() -> int:
    module = stock_module()
    version = stock_version()
    kernel = module.fused_sigmoid_gating_delta_rule_update_kernel
    same = True
    for batch in (8, 128) if version >= (0, 5, 22) else (8,):
        for dtype, state, tree in (
            ("fp32", "fp32", False),
            ("bf16", "fp32", False),
            ("bf16", "bf16", False),
            ("fp32", "bf16", False),
            ("bf16", "fp32", True),
            ("bf16", "bf16", True),
        ):
            block_v = default_config(batch=batch, dims=(K, V), either=False, hopper=True, sglang=version).block_v
            case = f"{dtype} inputs, {state} state, {'tree' if tree else 'chain'}, {block_v} values a program"
            own = ours(dtype, state, tree, batch, version)
            same &= same_arithmetic(case, own, stocks(kernel, dtype, state, tree, block_v))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
