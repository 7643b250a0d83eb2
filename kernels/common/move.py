"""Copy whole slots of a pool, all layers in one launch: states and conv windows alike.

Called wherever a slot might have to be brought up to date, so most calls have few slots to copy or none. A program
looks at the batch's pairs one after the other and copies its share of those that move; a call with nothing to do reads
two integers per row. The elements of a slot are one contiguous piece of memory per layer, cut into blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import INDICES, Arg, check

PROGRAMS = 1056  # eight of 256 threads for each of an H100's multiprocessors: what fits there at once
BLOCK_BYTES = 16384  # 64 bytes a thread under way
NUM_WARPS = 8


# by size or alignment of a batch nothing is gained, and a server would wait for each compilation
@triton.jit(do_not_specialize=["src_slots", "dst_slots", "batch"])
def _move_states_kernel(
    states,
    src_slots,
    dst_slots,
    batch,
    blocks,
    tasks,
    tasks_per_program,
    stride_layer,
    stride_slot,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A task is one block of a slot in one layer."""
    first = tl.program_id(0) * tasks_per_program
    for b in range(batch):
        src = tl.load(src_slots + b).to(tl.int64)
        dst = tl.load(dst_slots + b).to(tl.int64)
        if (src > 0) & (dst > 0) & (src != dst):
            for task in range(first, tl.minimum(first + tasks_per_program, tasks)):
                element = (task % blocks) * BLOCK + tl.arange(0, BLOCK)
                layer = states + (task // blocks).to(tl.int64) * stride_layer
                values = tl.load(layer + src * stride_slot + element, mask=element < SIZE)
                tl.store(layer + dst * stride_slot + element, values, mask=element < SIZE)


def move_states(states: torch.Tensor, *, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Copy slot src_slots[b] to slot dst_slots[b] in every layer. One launch, no host read.

    states     [L, S, ...] of any dtype, contiguous within a slot, any layer and slot stride: read at src_slots, written
               at dst_slots.
    src_slots, dst_slots
               [B] int32 or int64: read. A pair is skipped where src <= 0, dst <= 0 or src == dst. No dst is the dst or
               the src of another pair: pairs are copied in no particular order.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    if states.dim() < 3:
        raise ValueError(f"states: shape {tuple(states.shape)}, expected [L, S, ...]")
    inner = states.dim() - 2
    (batch,) = check(
        states=Arg(states, "L S" + inner * " _", contiguous=inner),
        src_slots=Arg(src_slots, "B", INDICES),
        dst_slots=Arg(dst_slots, "B", INDICES),
    ).get_all("B")
    layers, size = states.shape[0], states[0, 0].numel()
    if batch == 0 or layers == 0 or size == 0:
        return
    block = min(BLOCK_BYTES // states.element_size(), triton.next_power_of_2(size))
    blocks = triton.cdiv(size, block)
    tasks = layers * blocks
    per_program = triton.cdiv(tasks, PROGRAMS)
    _move_states_kernel[(triton.cdiv(tasks, per_program),)](
        states,
        src_slots,
        dst_slots,
        batch,
        blocks,
        tasks,
        per_program,
        states.stride(0),
        states.stride(1),
        SIZE=size,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
