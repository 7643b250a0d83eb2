"""Order of a verify's batch rows: those that fold first, once per forward, for all layers.

A program of a folding row runs several times as long as the others. Started last it would keep the GPU waiting with
most of it idle; started first it is covered by the short ones. Rows keep their order within both classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import check_dtype, check_index, check_same_device

MAX_ROWS = 4096


@triton.jit
def _fold_first_kernel(schedule, slots, pending, fold_threshold, batch, BLOCK_B: tl.constexpr):
    b = tl.arange(0, BLOCK_B)
    inside = b < batch
    slot = tl.load(slots + b, mask=inside, other=0).to(tl.int64)
    real = inside & (slot > 0)
    folds = tl.load(pending + slot, mask=real, other=0) > fold_threshold
    first = (real & folds).to(tl.int32)
    later = (inside & (first == 0)).to(tl.int32)
    place = tl.where(first == 1, tl.cumsum(first, axis=0) - 1, tl.sum(first, axis=0) + tl.cumsum(later, axis=0) - 1)
    tl.store(schedule + place, b, mask=inside)


def fold_first(schedule: torch.Tensor, *, slots: torch.Tensor, pending: torch.Tensor, fold_threshold: int) -> None:
    """Fill schedule with the batch rows 0..B-1, rows that the coming verify folds in front.

    schedule [>=B] int32, first B written; slots [B] int32 or int64 (<= 0: padding, never folds); pending [S] int32.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device.
    """
    batch = slots.shape[0]
    check_index("slots", slots, None)
    check_index("schedule", schedule, None)
    check_index("pending", pending, None)
    check_dtype("schedule", schedule, (torch.int32,))
    check_dtype("pending", pending, (torch.int32,))
    if batch > min(MAX_ROWS, schedule.shape[0]):
        raise ValueError(f"slots: {batch} rows, schedule holds {schedule.shape[0]} and the kernel {MAX_ROWS}")
    check_same_device(schedule=schedule, slots=slots, pending=pending)
    if batch:
        block = triton.next_power_of_2(batch)
        _fold_first_kernel[(1,)](
            schedule, slots, pending, fold_threshold, batch, BLOCK_B=block, num_warps=max(1, min(8, block // 128))
        )
