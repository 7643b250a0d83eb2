"""Turn recurrent states in place from one axis order (axis_order.py) into the other, in all layers.

    VK -> KV: head[k * V + v] = head[v * K + k],    KV -> VK: the other way round

Readers that know VK only (SGLang's prefill and decode) get their slots through this; it is called often and seldom has
anything to do. So a program looks at the batch's slots one after the other and does its share of the heads of those
that need it; a call with nothing to do reads one slot and one bit per row. A head is in registers as a whole, in parts
of BLOCK_R rows, before the first element is stored. The bits change in a second launch, when no program reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import INDICES, Arg, check
from .axis_order import KV, VK

PROGRAMS = 528  # four for each of an H100's multiprocessors: what fits there at once
BLOCK_R = 32
BLOCK_B = 128


# by size or alignment of a batch nothing is gained, and a server would wait for each compilation
@triton.jit(do_not_specialize=["slots", "batch"])
def _turn_states_kernel(
    states,
    axis_order,
    slots,
    batch,
    heads,
    tasks,
    tasks_per_program,
    stride_layer,
    stride_slot,
    stride_head,
    TO: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A head lies as [R, C] and becomes [C, R]. A task is one head of one layer."""
    first = tl.program_id(0) * tasks_per_program
    row = tl.arange(0, BLOCK_R)[:, None]
    col = tl.arange(0, BLOCK_C)[None, :]
    for b in range(batch):
        slot = tl.load(slots + b).to(tl.int64)
        turns = tl.load(axis_order + slot, mask=slot > 0, other=TO) != TO
        if turns:
            for task in range(first, tl.minimum(first + tasks_per_program, tasks)):
                layer = (task // heads).to(tl.int64)
                head = states + layer * stride_layer + slot * stride_slot + (task % heads) * stride_head
                parts = ()
                for start in tl.static_range(0, R, BLOCK_R):
                    inside = (start + row < R) & (col < C)
                    part = tl.load(head + (start + row) * C + col, mask=inside)
                    parts = parts + (part,)  # noqa: RUF005 (no unpacking in jit)
                # an element is read by one thread and written by another
                tl.debug_barrier()
                for start in tl.static_range(0, R, BLOCK_R):
                    inside = (start + row < R) & (col < C)
                    tl.store(head + col * R + start + row, parts[start // BLOCK_R], mask=inside)


@triton.jit(do_not_specialize=["slots", "batch"])
def _set_order_kernel(axis_order, slots, batch, TO: tl.constexpr, BLOCK_B: tl.constexpr):
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    slot = tl.load(slots + b, mask=b < batch, other=0).to(tl.int64)
    tl.store(axis_order + slot, tl.full((BLOCK_B,), TO, tl.uint8), mask=slot > 0)


def turn_states(states: torch.Tensor, axis_order: torch.Tensor, *, slots: torch.Tensor, to: int) -> None:
    """Bring the states of `slots` into the order `to` where they lie in the other one. Two launches, no host read.

    states      [L, S, HV, V, K] of any dtype, each head contiguous: turned in place at `slots`.
    axis_order  [S] uint8, VK or KV: read, then set to `to`, at `slots`.
    slots       [B] int32 or int64: read; entries <= 0 are skipped, the others distinct.
    to          VK or KV.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    sizes = check(
        states=Arg(states, "L S HV V K", contiguous=2),
        axis_order=Arg(axis_order, "S", torch.uint8),
        slots=Arg(slots, "B", INDICES),
    )
    layers, heads, values, keys, batch = sizes.get_all("L HV V K B")
    if to not in (VK, KV):
        raise ValueError(f"to: {to!r}, expected VK ({VK}) or KV ({KV})")
    tasks = layers * heads
    if batch == 0 or tasks == 0:
        return
    rows, columns = (values, keys) if to == KV else (keys, values)
    block_c = triton.next_power_of_2(columns)
    per_program = triton.cdiv(tasks, PROGRAMS)
    _turn_states_kernel[(triton.cdiv(tasks, per_program),)](
        states,
        axis_order,
        slots,
        batch,
        heads,
        tasks,
        per_program,
        states.stride(0),
        states.stride(1),
        states.stride(2),
        TO=to,
        R=rows,
        C=columns,
        BLOCK_R=BLOCK_R,
        BLOCK_C=block_c,
        num_warps=warps_for(rows, block_c),
    )
    _set_order_kernel[(triton.cdiv(batch, BLOCK_B),)](
        axis_order, slots, batch, TO=to, BLOCK_B=BLOCK_B, num_warps=BLOCK_B // 32
    )


def warps_for(rows: int, block_c: int) -> int:
    """Warps that leave at most 64 elements of a padded head to a thread."""
    padded = triton.cdiv(rows, BLOCK_R) * BLOCK_R * block_c
    return max(4, min(16, triton.next_power_of_2(padded) // (64 * 32)))
