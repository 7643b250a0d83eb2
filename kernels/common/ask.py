"""Asking for memory before it is needed (jit helper only).

A program's first loads stand in a chain: which row, which slot, how many tokens, where they lie, then what lies there.
Each link is a trip to memory in which nothing else is on its way. Where an address is known long before its load can be
issued, the line is asked into the L2 cache meanwhile. Nothing waits for it, and it changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes


@triton.jit
def ask(at, NATIVE: tl.constexpr):
    """Ask for the lines of memory at the pointers `at`, all of them inside their tensors. NATIVE: compiled, since the
    interpreter knows no PTX (and has no cache)."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def line_starts(TYPE: tl.constexpr, SIZE: tl.constexpr, inside):
    """Offsets of the lines of SIZE elements of TYPE, a power of two, of which the first `inside` are there; then the
    last of these again. (By arithmetic alone: SGLang puts a plain function in the place of triton.next_power_of_2.)"""
    PER_LINE: tl.constexpr = LINE * 8 // TYPE.primitive_bitwidth
    return tl.minimum(tl.arange(0, (SIZE + PER_LINE - 1) // PER_LINE) * PER_LINE, inside - 1)
