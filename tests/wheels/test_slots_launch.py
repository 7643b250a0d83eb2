"""The slots kernels are cut up as SGLang's verify kernels are, version by version: their last bits hang on it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from mamba_mtp_kernels.gdn.verify_slots import default_config
from mamba_mtp_kernels.mamba2.arguments import stock_tiling

from sglang_mamba_mtp.compat.version import numbers

from .conftest import VERSIONS, sources_of
from .sources import Sources

MAMBA2 = "sglang.kernels.ops.mamba.triton_ops.mamba_ssm:selective_state_update"
GDN = tuple(
    f"sglang.kernels.ops.attention.{folder}.fused_sigmoid_gating_recurrent:{{}}" for folder in ("linear", "fla")
)


def tiling_of(sources: Sources) -> Callable[[int], tuple[int, int]]:
    """How `selective_state_update` chooses rows of a program and warps by dstate."""
    function = sources.find(MAMBA2)
    assert function is not None
    (chosen,) = (
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "(BLOCK_SIZE_M, num_warps)"
    )
    code = compile(ast.Expression(chosen), "tiling", "eval")
    return lambda dstate: eval(code, {"dstate": dstate})


@pytest.mark.parametrize("each", VERSIONS)
def test_mamba2_tiles_are_those_of_the_version(each):
    stock = tiling_of(sources_of(each))
    for dstate in (16, 24, 32, 64, 96, 128, 130, 256):
        assert stock(dstate) == stock_tiling(dstate, numbers(each)), dstate


def launch_of(sources: Sources, *, hopper: bool) -> Callable[[int], tuple[int, int]]:
    """How GDN's verify chooses values of a program and warps by batch, for K = V = 128, on an NVIDIA GPU."""
    path = next(path for path in GDN if sources.find(path.format("fused_sigmoid_gating_delta_rule_update")))
    chooser = sources.find(path.format("_select_recurrent_launch_config"))
    if chooser is None:
        verify = ast.unparse(sources.find(path.format("fused_sigmoid_gating_delta_rule_update")))  # type: ignore[arg-type]
        assert "min(triton.next_power_of_2(V), 32)" in verify and "num_warps = 1" in verify
        return lambda batch: (32, 1)
    gpu = dict.fromkeys(("_is_hip", "_is_gfx95", "_is_sm103", "_is_sm107"), False) | {"_is_sm90": hopper}
    scope: dict[str, Any] = {"triton": SimpleNamespace(next_power_of_2=triton.next_power_of_2), **gpu}
    exec(compile(ast.Module([chooser], []), "launch", "exec"), scope)  # type: ignore[list-item]
    verify = {"target_verify": True} if "target_verify" in ast.unparse(chooser) else {}
    return lambda batch: scope["_select_recurrent_launch_config"](batch, 16, 32, 128, 128, False, **verify)


@pytest.mark.parametrize("hopper", [True, False], ids=["Hopper", "other"])
@pytest.mark.parametrize("each", VERSIONS)
def test_gdn_tiles_are_those_of_the_version(each, hopper):
    stock = launch_of(sources_of(each), hopper=hopper)
    for batch in (1, 64, 65, 256):
        ours = default_config(batch=batch, dims=(128, 128), either=False, hopper=hopper, sglang=numbers(each))
        assert stock(batch) == (ours.block_v, 1), batch
