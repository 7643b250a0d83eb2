"""What a prefill snapshots, worked out from host lists."""

from __future__ import annotations

import random

import pytest

from sglang_mamba_mtp import tracking
from sglang_mamba_mtp.tracking import FLAT_GRID, PER_SEQUENCE, PER_SEQUENCE_FLOOR, HostTracking


def naive_chunks(lens, chunk):
    tokens = [(row, position) for row, length in enumerate(lens) for position in range(length)]
    starts = [
        place
        for place, (row, _) in enumerate(tokens)
        if place == 0 or place % chunk == 0 or row != tokens[place - 1][0]
    ]
    return [start // chunk for start in starts], [start % chunk for start in starts]


def test_logical_chunks():
    assert tracking.logical_chunks([5, 5], 8) == ([0, 0, 1], [0, 5, 0])
    rng = random.Random(0)
    for _ in range(200):
        lens = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
        assert tracking.logical_chunks(lens, 8) == naive_chunks(lens, 8)


@pytest.mark.parametrize("boundary_states", [PER_SEQUENCE, PER_SEQUENCE_FLOOR, FLAT_GRID])
def test_plan_by_hand(boundary_states):
    plan = tracking.plan_tracking(
        HostTracking([True, False, True, True], [16, -1, 35 + 20, 20]),
        [16, 5, 20, 20],
        [0, 0, 35, 0],
        chunk_size=16,
        snapshot_size=16,
        boundary_states=boundary_states,
        conv_window=3,
    )
    assert plan.rows == [0, 2, 3]
    assert plan.conv_starts == [16 - 3, 21 + 16 - 3, 41 + 16 - 3]
    assert plan.final_rows == [0] and plan.unaligned_rows == [2, 3] and plan.chunks == [-1, -1, 1, 1]
    if boundary_states == FLAT_GRID:  # 21 + 16 and 41 + 16 are no multiples of 16
        assert plan.h_rows == [] and plan.recompute_rows == [2, 3] and plan.recompute_ends == [37, 57]
    else:
        assert plan.h_rows == [2, 3] and plan.h_src == ([3, 5] if boundary_states == PER_SEQUENCE else [2, 3])


def test_checkpoints_by_hand():
    """Rows of 70, 5, 64 and 40 tokens with a state every 32: 2, 0, 2 and 1 of them. The first row is snapshotted at its
    second state, the third, which ends on one, by its final state, the last at its first."""
    lens, prefixes = [70, 5, 64, 40], [10, 0, 0, 7]
    plan = tracking.plan_checkpoints(
        HostTracking([True, False, True, True], [10 + 65, -1, 64, 7 + 33]), lens, prefixes, every=32
    )
    assert plan.starts == [0, 2, 2, 4, 5] and plan.sources == [1, 4]


def test_tracking_may_cover_fewer_rows_than_a_padded_batch():
    plan = tracking.plan_checkpoints(HostTracking([True], [33]), [40, 64], [0, 0], every=32)
    assert plan.starts == [0, 1, 3] and plan.sources == [0]


def test_a_state_before_the_first_checkpoint_is_an_error():
    """SGLang raises too: the prefill leaves no such state."""
    with pytest.raises(ValueError, match=r"row 1.*20 tokens.*32"):
        tracking.plan_checkpoints(HostTracking([False, True], [-1, 25]), [40, 40], [0, 5], every=32)
