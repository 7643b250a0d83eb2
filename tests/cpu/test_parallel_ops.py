"""Copies between the tokens of one rank and those of all."""

from __future__ import annotations

import pytest
import torch

from sglang_mamba_mtp.cpu.parallel_ops import memcpy_cpu


@pytest.mark.parametrize(("first", "rows"), [(0, 3), (2, 3), (4, 0)])
def test_rows_go_there_and_back(first, rows):
    """Nothing beside the rows asked for is written."""
    mine, all_ranks = torch.randn(5, 2), torch.zeros(7, 2)
    memcpy_cpu(all_ranks, mine, 0, torch.tensor([first]), torch.tensor([rows]), False)
    assert torch.equal(all_ranks[first : first + rows], mine[:rows])
    assert all_ranks.count_nonzero() == 2 * rows
    back = torch.zeros(5, 2)
    memcpy_cpu(back, all_ranks, 0, torch.tensor([first]), torch.tensor([rows]), True)
    assert torch.equal(back[:rows], mine[:rows]) and back.count_nonzero() == 2 * rows
