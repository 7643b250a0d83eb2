"""fold_first: a permutation of the batch rows with those that fold in front."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common import ops_for
from mamba_mtp_kernels.common.reference import fold_first_reference
from mamba_mtp_kernels.common.schedule import fold_first

OPS = [pytest.param(fold_first, id="kernel"), pytest.param(fold_first_reference, id="reference")]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [1, 2, 7, 64, 300])
def test_matches_the_rule(op, dtype, batch, device):
    generator = torch.Generator().manual_seed(batch)
    pending = torch.randint(0, 9, (batch + 5,), generator=generator, dtype=torch.int32)
    slots = 1 + torch.randperm(batch + 4, generator=generator)[:batch]
    slots[batch // 2] = -(batch % 2)
    pending[0] = pending[-1] = 100  # a padding row must not fold by what slots 0 and -1 hold
    schedule = torch.full((batch + 2,), -7, dtype=torch.int32, device=device)
    op(schedule, slots=slots.to(device, dtype), pending=pending.to(device), fold_threshold=4)
    folds = [int(slot) > 0 and int(pending[slot]) > 4 for slot in slots]
    expected = [b for b in range(batch) if folds[b]] + [b for b in range(batch) if not folds[b]]
    assert schedule.tolist() == [*expected, -7, -7]


def test_too_small(device):
    slots = torch.ones(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="3 rows, schedule holds 2"):
        fold_first(slots[:2].clone(), slots=slots, pending=slots, fold_threshold=0)


def test_ops_for():
    assert ops_for("cpu").fold_first is fold_first_reference
    assert ops_for("cuda").fold_first is fold_first
