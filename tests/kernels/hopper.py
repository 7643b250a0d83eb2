"""Kernels compiled for a GPU without one, in a process whose Triton does not interpret."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from triton import JITFunction, compile
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from .ptx import stored_values

_CAPABILITY = ContextVar("capability", default=90)


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Within, kernels are compiled for this compute capability (sm_80: 80); else for Hopper's, 90."""
    token = _CAPABILITY.set(capability)
    try:
        yield
    finally:
        _CAPABILITY.reset(token)


def has_dependent_launch() -> bool:
    """Whether what is compiled for has it (mamba_mtp_kernels.common.dependent)."""
    return _CAPABILITY.get() >= 90


def compiled(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    *,
    floats: Collection[str] = (),
    unspecialised: Collection[str] = (),
    num_warps: int,
    num_stages: int = 3,
    max_registers: int = 0,
) -> Any:
    """What Triton makes of a kernel. Constants the kernel has not got are left out; other integers are
    divisible by 16, as the strides and sizes of real models are, but for the unspecialised. max_registers: a thread's;
    0: the compiler's choice."""
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    missing = [param.name for param in kernel.params if param.is_constexpr and param.name not in constants]
    if missing:  # Triton would take them for arguments of the launch, and compile every branch that they choose
        raise TypeError(f"{kernel.__name__}: no constant for {', '.join(missing)}")
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
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if max_registers:
        options["maxnreg"] = max_registers
    return compile(source, target=GPUTarget("cuda", _CAPABILITY.get(), 32), options=options)


def resources(kernel: Any) -> dict[str, int]:
    """Of a compiled kernel: registers a thread, bytes spilled (stores and loads), bytes of shared memory a block."""
    capability = _CAPABILITY.get()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", source]
        command += ["-o", Path(folder) / "kernel.cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
        "shared": kernel.metadata.shared,
    }


def same_arithmetic(case: str, ours: Any, stock: Any) -> bool:
    """Whether two compiled kernels store the same values; prints a line."""
    got, want = stored_values(ours.asm["ptx"]), stored_values(stock.asm["ptx"])
    differ = sum(a != b for a, b in zip(got, want, strict=False)) + abs(len(got) - len(want))
    print(f"{case}: {differ} of {len(want)} stored values differ", flush=True)
    return differ == 0 and bool(want)
