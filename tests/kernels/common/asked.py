"""Compile a kernel that asks for memory, for sm_90 (no GPU needed), and print its prefetches.

python -m tests.kernels.common.asked
"""

from __future__ import annotations

import os
import re

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton
import triton.language as tl
from mamba_mtp_kernels.common.ask import ask, line_starts

from ..hopper import compiled


@triton.jit
def _kernel(x, SIZE: tl.constexpr):
    ask(x + line_starts(x.dtype.element_ty, SIZE, SIZE), True)


if __name__ == "__main__":
    # as SGLang does: kernels cannot call it any more
    triton.next_power_of_2 = lambda n: n
    # eight lines, in a warp of 32 threads one of them a thread
    ptx = compiled(_kernel, {"x": "fp32"}, {"SIZE": 256}, num_warps=1).asm["ptx"]
    print("\n".join(re.findall(r"prefetch\S*", ptx)))
