"""Compiled for an H100, the slots kernel computes what SGLang's does, contraction by contraction. Needs no GPU."""

from __future__ import annotations

from ..helpers import run_compiling
from ..ptx import stored_values
from .stock import stock_module


def test_contractions_are_those_of_stock() -> None:
    """Bits hang on which product of a sum the compiler fuses, and it is easily led to another."""
    stock_module()  # or skip
    run = run_compiling(f"{__package__}.slots_ptx")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert run.stdout.count("stored values differ") >= 6, run.stdout


LOOP = """
$L__BB0_1:
    ld.global.v2.b32 {{ %r1, %r2 }}, [%rd1];
    mul.f32 %r3, %r6, {decay};
    mul.f32 %r4, %r7, {decay};
    mul.f32 %r5, %r4, %r2;
    fma.rn.f32 %r6, %r3, %r1, %r5;
    {last};
    st.global.v4.b32 [%rd2], {{ %r6, %r7, %r6, %r7 }};
    @%p1 bra $L__BB0_1;
"""


def test_expressions_tell_which_product_is_fused() -> None:
    """Operands may swap; the fused product may not, nor an addend, nor what is carried to the next turn."""

    def values(last: str, decay: str = "0f3F000000") -> list[str]:
        return stored_values(LOOP.format(last=last, decay=decay))

    same = values("fma.rn.f32 %r7, %r4, %r2, %r5")
    assert same == values("fma.rn.f32 %r7, %r2, %r4, %r5")
    for other in ("fma.rn.f32 %r7, %r4, %r2, %r3", "fma.rn.f32 %r7, %r3, %r2, %r5", "add.f32 %r7, %r5, %r5"):
        assert same != values(other)
    assert same != values("fma.rn.f32 %r7, %r4, %r2, %r5", decay="0f3F800000")
