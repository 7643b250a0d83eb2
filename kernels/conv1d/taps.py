"""What the tree convolutions share: steps up a node's path, the rounding of one tap, and the activation.

Rounding follows SGLang's causal_conv1d_update (Triton): each product in the operands' common dtype (so bf16 x bf16
rounds to bf16), summed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def above(node, parents_row):
    """Parent of a node, -1 for the root and for what lies before it."""
    parent = tl.load(parents_row + tl.maximum(node, 0))
    return tl.where(node >= 0, tl.minimum(parent, node - 1), -1)


@triton.jit
def product(value, weight):
    """value * weight in their common dtype, as float32."""
    if value.dtype == tl.bfloat16 and weight.dtype == tl.bfloat16:
        # Triton's interpreter has no bf16 arithmetic; two bf16 multiply exactly in float32
        exact = value.to(tl.float32) * weight.to(tl.float32)
        return exact.to(tl.bfloat16).to(tl.float32)
    return (value * weight).to(tl.float32)


@triton.jit
def add_tap(acc, node, tree, old, weight):
    """acc + weight * input, from the tree where node >= 0 and from the old window otherwise."""
    if tree.dtype == old.dtype:
        return acc + product(tl.where(node >= 0, tree, old), weight)
    # the sum on each side: multiply and add contract to one rounding, as in stock
    return tl.where(node >= 0, acc + product(tree, weight), acc + product(old, weight))


@triton.jit
def activated(acc, SILU: tl.constexpr):
    """The sum, or its SiLU."""
    return acc / (1 + tl.exp(-acc)) if SILU else acc


@triton.jit
def activated_in_powers_of_two(acc, SILU: tl.constexpr):
    """`activated` with three or four instructions fewer; on a GPU the same bits.

    tl.exp multiplies by the same number. But it takes care of powers too small for a normal float32, and here all of
    them vanish beside the one.
    """
    return acc / (1 + tl.exp2(acc * -1.4426950408889634)) if SILU else acc
