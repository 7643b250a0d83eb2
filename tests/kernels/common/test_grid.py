"""launch_grid: what CUDA takes passes, what it refuses is said with its numbers."""

from __future__ import annotations

import pytest
from mamba_mtp_kernels.common.grid import launch_grid


@pytest.mark.parametrize("axes", [(2**31 - 1,), (2**31 - 1, 65_535), (1, 65_535, 65_535)])
def test_the_longest_grids(axes):
    assert launch_grid(*axes) == axes


@pytest.mark.parametrize(
    ("axes", "axis", "limit"), [((2**31,), 0, 2**31 - 1), ((1, 65_536), 1, 65_535), ((1, 1, 65_536), 2, 65_535)]
)
def test_longer_ones(axes, axis, limit):
    with pytest.raises(ValueError, match=f"axis {axis} has at most {limit}"):
        launch_grid(*axes)
