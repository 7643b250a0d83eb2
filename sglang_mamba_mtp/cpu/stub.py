"""The `sgl_kernel` stub: CPU versions of the ops SGLang's CPU engine calls, and an error that names any other.

`sgl_kernel`'s CUDA wheel links libcuda and does not import without it; no CPU wheel is published. SGLang reads ops in
two ways: functions of the package (`from sgl_kernel import verify_tree_greedy_cpu`) and `torch.ops.sgl_kernel.<op>`.
The ops are plain Python functions bound on the `torch.ops.sgl_kernel` namespace: they are only ever called eagerly, and
a dispatcher schema would add 20 us a call and hide their signatures.

`convert_weight_packed` must stay absent: SGLang takes that symbol for the AMX build of the library.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from sglang_mamba_mtp.cpu import conv1d_ops, gdn_ops, qwen3_5_ops, sampling_ops, speculative_ops

SHIM_FOLDER = str(Path(__file__).parent / "shim")

TORCH_OPS: dict[str, Callable[..., Any]] = {
    "fused_sigmoid_gating_delta_rule_update_cpu": gdn_ops.fused_sigmoid_gating_delta_rule_update_cpu,
    "fused_gdn_gating_cpu": gdn_ops.fused_gdn_gating_cpu,
    "fused_rmsnorm_gated_cpu": gdn_ops.fused_rmsnorm_gated_cpu,
    "fused_sigmoid_mul_cpu": qwen3_5_ops.fused_sigmoid_mul_cpu,
    "fused_qk_gemma_rmsnorm_cpu": qwen3_5_ops.fused_qk_gemma_rmsnorm_cpu,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": qwen3_5_ops.fused_qk_gemma_rmsnorm_with_gate_cpu,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": qwen3_5_ops.fused_qkvzba_split_reshape_cat_contiguous_cpu,
}
"""Read as `torch.ops.sgl_kernel.<name>`."""

MAMBA: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule_cpu": gdn_ops.chunk_gated_delta_rule_cpu,
    "causal_conv1d_fn_cpu": conv1d_ops.causal_conv1d_fn_cpu,
    "causal_conv1d_update_cpu": conv1d_ops.causal_conv1d_update_cpu,
}
"""Members of `sgl_kernel.mamba`."""

SPECULATIVE: dict[str, Callable[..., Any]] = {
    name: getattr(speculative_ops, name)
    for name in (
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "build_tree_kernel_efficient_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "reconstruct_indices_from_tree_mask",
        "verify_tree_greedy_cpu",
    )
}
"""Members of `sgl_kernel.speculative`, and of `sgl_kernel` itself."""

SAMPLING: dict[str, Callable[..., Any]] = {
    name: getattr(sampling_ops, name)
    for name in ("top_k_renorm_prob", "top_p_renorm_prob", "tree_speculative_sampling_target_only")
}
"""Members of `sgl_kernel` itself, where 0.5.17 looks for them; later versions: `patches`."""

KVCACHE: dict[str, Callable[..., Any]] = {"copy_all_layer_kv_cache_cpu": speculative_ops.copy_all_layer_kv_cache_cpu}
"""Members of `sgl_kernel.kvcacheio`, and of `sgl_kernel` itself."""

NAMED_ON_IMPORT = ("rotate_input_ids_cpu", "build_draft_decode_metadata_cpu")
"""Imported by name at the top of SGLang modules, but called only for models or backends not served here."""


def _error(name: str) -> str:
    return f"sgl_kernel.{name} has no CPU version in sglang_mamba_mtp.cpu"


def _missing(name: str) -> Callable[..., NoReturn]:
    def op(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(_error(name))

    op.__name__ = name
    return op


def _raise_on_read(module: str) -> Callable[[str], NoReturn]:
    """A module `__getattr__`: AttributeError, so that `hasattr` and `try: from sgl_kernel import x` keep working."""
    prefix = module.removeprefix("sgl_kernel").lstrip(".")

    def read(name: str) -> NoReturn:
        raise AttributeError(_error(f"{prefix}.{name}" if prefix else name))

    return read


def fill(package: ModuleType) -> None:
    """Give an empty `sgl_kernel` package its members and submodules, and bind the torch ops."""
    submodules = {"mamba": MAMBA, "speculative": SPECULATIVE, "kvcacheio": KVCACHE}
    for short, members in submodules.items():
        name = f"sgl_kernel.{short}"
        module = ModuleType(name, f"CPU stand-ins; see {__name__}")
        vars(module).update(members, __getattr__=_raise_on_read(name))
        sys.modules[name] = module
        setattr(package, short, module)
    placeholders = {name: _missing(name) for name in NAMED_ON_IMPORT}
    vars(package).update(MAMBA | SPECULATIVE | SAMPLING | KVCACHE | placeholders, __version__="0.0.0+cpu")
    vars(package)["__getattr__"] = _raise_on_read("sgl_kernel")
    for name, op in TORCH_OPS.items():
        setattr(torch.ops.sgl_kernel, name, op)


def register() -> None:
    """Make `import sgl_kernel` find the stub, here and in every process spawned from here."""
    for name in [n for n in sys.modules if n == "sgl_kernel" or n.startswith("sgl_kernel.")]:
        del sys.modules[name]  # what a failed import of the wheel left behind
    sys.path[:] = [SHIM_FOLDER, *(p for p in sys.path if p != SHIM_FOLDER)]
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != SHIM_FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([SHIM_FOLDER, *inherited])
    importlib.invalidate_caches()
    __import__("sgl_kernel")
