"""A tile of state in float32 registers, from and to a slot in either layout (common/layout.py).

Kernels compute in the tile that [V, K] gives them, whichever way a slot lies: sums over K run in one order and the bits
of a state do not depend on the layout of any slot. The compiler lays a tile out as the load it meets last, hence [V, K]
after [K, V] below, and both in one place; a [K, V] tile is turned in shared memory on its way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.checks import check_dtype, check_inner_contiguous, check_shape
from ..common.layout import KV, VK

IS_KV = tl.constexpr(KV)


@triton.jit
def load_state(p_vk, p_kv, mask, is_kv, LAYOUTS: tl.constexpr):
    """The tile at p_kv if is_kv, else at p_vk. Without LAYOUTS all is [V, K]."""
    if LAYOUTS:
        if is_kv:
            tile = tl.load(p_kv, mask=mask, other=0).to(tl.float32)
        else:
            tile = tl.load(p_vk, mask=mask, other=0).to(tl.float32)
    else:
        tile = tl.load(p_vk, mask=mask, other=0).to(tl.float32)
    return tile


@triton.jit
def store_state(p_vk, p_kv, tile, mask, is_kv, LAYOUTS: tl.constexpr):
    """tile, of the pool's dtype, to where load_state finds it."""
    if LAYOUTS:
        if is_kv:
            tl.store(p_kv, tile, mask=mask)
        else:
            tl.store(p_vk, tile, mask=mask)
    else:
        tl.store(p_vk, tile, mask=mask)


def check_layout(state_layout: torch.Tensor | None, slots: int, write_layout: int = VK) -> None:
    """Raise unless state_layout is None or a uint8 vector of this many slots, and write_layout one that it allows."""
    if write_layout not in (VK, KV):
        raise ValueError(f"write_layout: {write_layout}, expected {VK} (VK) or {KV} (KV)")
    if state_layout is None:
        if write_layout != VK:
            raise ValueError(f"write_layout: {write_layout} (KV) without a state_layout to say so")
        return
    check_shape("state_layout", state_layout, (slots,))
    check_dtype("state_layout", state_layout, (torch.uint8,))
    check_inner_contiguous("state_layout", state_layout)
