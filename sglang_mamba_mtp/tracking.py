"""Which states a prefill snapshots for the prefix cache, from host lists alone.

Up to 0.5.20 SGLang answers this on the device and copies back: one `.any()`, six `.cpu()` and one `nonzero` per
forward, each a synchronisation with the forward in flight. Everything it asks for is known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

#: Where a prefill kernel leaves the states at chunk boundaries (`h`), as the row arithmetic of the snapshots needs it.
PER_SEQUENCE = "per_sequence"  # ceil(len / chunk) states a sequence, one sequence after the other
PER_SEQUENCE_FLOOR = "per_sequence_floor"  # floor(len / chunk) states a sequence (Mamba2 up to 0.5.19)
FLAT_GRID = "flat_grid"  # one grid over the whole flattened batch; states off it are recomputed (Mamba2 later)


@dataclass(frozen=True)
class HostTracking:
    """What a prefill batch snapshots for the prefix cache, on the host.

    Attributes
        mask: per row, whether it is tracked.
        seqlens: per row, the sequence length to snapshot at (SGLang's convention; meaningless where not tracked).
    """

    mask: Sequence[bool]
    seqlens: Sequence[int]


@dataclass
class TrackPlan:
    """Row and state indices of one prefill, as lists of ints.

    A tracked row whose length ends on a chunk boundary takes the state its prefill leaves in the row's slot
    (`final_rows`). Any other takes the state at its last boundary from `h`, the states the kernel returns
    (`h_rows`, `h_src`), or has it recomputed where `h` holds no such state (`recompute_rows`, `recompute_ends`).
    """

    rows: list[int] = field(default_factory=list)
    conv_starts: list[int] = field(default_factory=list)
    final_rows: list[int] = field(default_factory=list)
    unaligned_rows: list[int] = field(default_factory=list)
    h_rows: list[int] = field(default_factory=list)
    h_src: list[int] = field(default_factory=list)
    recompute_rows: list[int] = field(default_factory=list)
    recompute_ends: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


def plan_tracking(
    tracking: HostTracking,
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    chunk_size: int,
    snapshot_size: int,
    boundary_states: str,
    conv_window: int,
) -> TrackPlan:
    """Plan the snapshots of one prefill.

    Args
        tracking: what is tracked; may cover fewer rows than the batch (padding), never more than the lengths do.
        extend_lens, prefix_lens: per row, tokens of this forward and tokens before it.
        chunk_size: tokens between two states of `h`.
        snapshot_size: tokens between two places the prefix cache snapshots at (a multiple of ``chunk_size``).
        boundary_states: how `h` is laid out (`compat.batches.boundary_states`).
        conv_window: columns of the convolution state.

    Returns
        The plan; `chunks` has an entry for every row of `extend_lens` (-1: nothing to take from within the row).
    """
    starts = list(accumulate(extend_lens, initial=0))
    states = {
        PER_SEQUENCE: [(length + chunk_size - 1) // chunk_size for length in extend_lens],
        PER_SEQUENCE_FLOOR: [length // chunk_size for length in extend_lens],
    }.get(boundary_states, [])
    first_state = list(accumulate(states, initial=0))
    plan = TrackPlan(chunks=[-1] * len(extend_lens))
    for row, tracked in enumerate(tracking.mask):
        if not tracked:
            continue
        length = tracking.seqlens[row] - prefix_lens[row]
        chunk = length // chunk_size
        plan.rows.append(row)
        plan.conv_starts.append(starts[row] + length // snapshot_size * snapshot_size - conv_window)
        if length % chunk_size == 0:
            plan.final_rows.append(row)
            continue
        plan.unaligned_rows.append(row)
        plan.chunks[row] = chunk
        end = starts[row] + chunk * chunk_size
        if boundary_states != FLAT_GRID:
            plan.h_rows.append(row)
            plan.h_src.append(first_state[row] + chunk)
        elif end % chunk_size == 0:
            plan.h_rows.append(row)
            plan.h_src.append(end // chunk_size)
        else:
            plan.recompute_rows.append(row)
            plan.recompute_ends.append(end)
    return plan


@dataclass(frozen=True)
class CheckpointPlan:
    """Where FlashInfer's GDN prefill leaves the states it is asked for, one a snapshot size.

    Attributes
        starts: per row, and once more at the end, the number of states that the rows before it leave.
        sources: per tracked row whose length ends off a boundary, which of all states is its last one.
    """

    starts: list[int]
    sources: list[int]


def plan_checkpoints(
    tracking: HostTracking, extend_lens: Sequence[int], prefix_lens: Sequence[int], *, every: int
) -> CheckpointPlan:
    """What SGLang's `maybe_build_flashinfer_checkpoint_plan` reads from the device, from host lists.

    A row leaves a state after every ``every`` of its tokens, none before the first. Arguments as in `plan_tracking`.

    Raises
        ValueError: a tracked row has not even one state, as in SGLang.
    """
    starts = list(accumulate((length // every for length in extend_lens), initial=0))
    sources: list[int] = []
    for row, tracked in enumerate(tracking.mask):
        length = tracking.seqlens[row] - prefix_lens[row]
        if not tracked or length % every == 0:
            continue
        if length < every:
            raise ValueError(f"row {row} is tracked after {length} tokens, and its first state comes after {every}")
        sources.append(starts[row] + length // every - 1)
    return CheckpointPlan(starts, sources)


def logical_chunks(lens: Sequence[int], chunk_size: int) -> tuple[list[int], list[int]]:
    """Split a flattened batch wherever a sequence or a physical chunk of ``chunk_size`` tokens begins.

    Returns
        Per piece, the physical chunk it lies in and its offset there.
    """
    indices: list[int] = []
    offsets: list[int] = []
    position = 0
    for end in accumulate(lens):
        while position < end:
            indices.append(position // chunk_size)
            offsets.append(position % chunk_size)
            position = min(end, (position // chunk_size + 1) * chunk_size)
    return indices, offsets
