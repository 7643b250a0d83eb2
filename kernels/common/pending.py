"""How many tokens of a slot are pending, and how many of them the coming verify folds (jit helper only).

Every kernel of a verify, and of the commit after it, asks here or a plan that was made with it (plan.py): what one of
them folds the others must not replay.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pending_and_folding(pending, newest, slot, fold_threshold, fold_at_once):
    """Pending tokens of `slot`, and how many of them, the oldest, its next verify folds: see operands.Window."""
    before = tl.load(pending + slot)
    stay = 0
    if newest is not None:
        stay = tl.load(newest + slot)
    return before, tl.where(before > fold_threshold, tl.minimum(before - stay, fold_at_once), 0)
