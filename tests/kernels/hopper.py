"""Kernels compiled for an H100 without one. Import it where Triton does not interpret: it takes that setting away."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

from triton import JITFunction, compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .ptx import stored_values


def ptx_of(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    *,
    floats: Collection[str] = (),
    unspecialised: Collection[str] = (),
    num_warps: int,
) -> str:
    """PTX for sm_90. Constants the kernel has not got are left out; other integers are divisible by 16, as the strides
    and sizes of real models are, but for the unspecialised."""
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in floats:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{pointers[name]}" if name in pointers else "i32"
            if name not in unspecialised:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": 3}).asm[
        "ptx"
    ]


def same_arithmetic(case: str, ours: str, stock: str) -> bool:
    """Whether two kernels store the same values; prints a line."""
    got, want = stored_values(ours), stored_values(stock)
    differ = sum(a != b for a, b in zip(got, want, strict=False)) + abs(len(got) - len(want))
    print(f"{case}: {differ} of {len(want)} stored values differ", flush=True)
    return differ == 0 and bool(want)
