"""SGLang's own verify kernel, as its backend calls it: chain and tree, the state after each node into a buffer."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from .slots_case import SlotsCase

# 0.5.23, 0.5.17
MODULES = (
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent",
)


def stock_module() -> ModuleType:
    """The module of SGLang's kernel; skips the test where there is none."""
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    pytest.skip("no stock kernel: " + "; ".join(reasons))


def stock_version(module: ModuleType) -> tuple[int, int, int]:
    """The version `module` is of: the older keeps its kernels elsewhere."""
    return (0, 5, 17) if module.__name__ == MODULES[1] else (0, 5, 23)


@triton.jit
def _divided_by_norm(x):
    return x / (tl.sqrt(tl.sum(x * x) + 1e-6))


def normalise_as(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give our kernel 0.5.17's x / n where that is stock's: in the interpreter it is not x * (1 / n), as on a GPU."""
    if "b_k / (tl.sqrt(" in inspect.getsource(module):
        monkeypatch.setattr("mamba_mtp_kernels.gdn.verify_slots._normalised", _divided_by_norm)


def stock_verify(module: ModuleType, case: SlotsCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B*N, HV, V], states [B, N, HV, V, K]) of a case whose read slots all are VK; `case` stays as it is."""
    batch, device = case.read_slots.shape[0], case.q.device
    buffer = torch.full((batch, case.nodes, *case.states.shape[1:]), float("nan"), device=device)
    buffer = buffer.to(case.states.dtype)
    out = module.fused_sigmoid_gating_delta_rule_update(
        A_log=case.A_log,
        dt_bias=case.dt_bias,
        q=case.q[None],
        k=case.k[None],
        v=case.v[None],
        a=case.a,
        b=case.b,
        initial_state_source=case.states,
        initial_state_indices=case.read_slots,
        cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=device) * case.nodes,
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=False,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.arange(batch, dtype=torch.int32, device=device),
        cache_steps=case.nodes,
        retrieve_parent_token=case.parents,
    )
    return out.view(case.v.shape), buffer
