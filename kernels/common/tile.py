"""A tile of state in float32 registers, from and to a slot in either axis order (axis_order.py).

Kernels of every family compute in the tile that VK gives them, whichever way a slot lies, so that sums over the last
axis run in one order. The compiler lays a tile out as the load it meets last, hence VK after KV below, and both in one
place; a KV tile is turned in shared memory on its way. (Variants with and without EITHER are compiled apart all the
same, and may contract products differently.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .axis_order import KV

IS_KV = tl.constexpr(KV)


@triton.jit
def load_state(in_vk, in_kv, mask, is_kv, EITHER: tl.constexpr):
    """The tile at the pointers in_kv if is_kv, else at in_vk. is_kv counts only where slots lie in EITHER order."""
    if EITHER:
        if is_kv:
            tile = tl.load(in_kv, mask=mask, other=0.0).to(tl.float32)
        else:
            tile = tl.load(in_vk, mask=mask, other=0.0).to(tl.float32)
    else:
        tile = tl.load(in_vk, mask=mask, other=0.0).to(tl.float32)
    return tile


@triton.jit
def store_state(in_vk, in_kv, tile, mask, is_kv, EITHER: tl.constexpr):
    """tile, rounded to the pool's dtype, to where load_state finds it."""
    tile = tile.to(in_vk.dtype.element_ty)
    if EITHER:
        if is_kv:
            tl.store(in_kv, tile, mask=mask)
        else:
            tl.store(in_vk, tile, mask=mask)
    else:
        tl.store(in_vk, tile, mask=mask)
