"""Launch grids at sizes that no axis but the first may hold, CUDA allows 65,535 programs along the others; and whose
kernels start while the one before them runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds, NodeSlots, Rows, States, plan_width
from mamba_mtp_kernels.mamba2 import fold, scores, verify_replay, verify_slots
from mamba_mtp_kernels.mamba2.window import Mamba2Window

OTHER_AXES = 65_535
DSTATE = 16


class Recorder:
    """Stands for a kernel; keeps the grids and options it is launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **options: self.options.append(options)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def launch(kernel: str, rows: int, heads: int, headdim: int, **how: bool) -> None:
    """Call a launcher for batch rows of one node each, all with the shapes of real tensors."""
    slots = torch.zeros(rows, dtype=torch.int32)
    states = States(empty(1, heads, headdim, DSTATE))
    window = Mamba2Window(
        torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), 0,
        empty(1, 2, heads, headdim), empty(1, 2, 1, DSTATE), empty(1, 2, heads),
    )  # fmt: skip
    if kernel == "fold":
        every = [torch.stack([tensor]) for tensor in (window.x, window.B, window.dt)]
        layers = Mamba2Window(window.pending, window.order, 0, *every)
        fold.mamba2_fold(States(states.data[None]), layers, Folds(slots, slots, slots, slots), A=empty(1, heads))
        return
    inputs = {"dt": empty(rows, heads), "C": empty(1, 1, DSTATE).expand(rows, 1, DSTATE)}
    shared = {"A": empty(heads), "D": None, "dt_bias": None, "dt_softplus": True, "states": states}
    shared["out"] = empty(1, heads, headdim).expand(rows, heads, headdim)
    if kernel == "verify_replay":
        ancestors = torch.zeros(rows, 1, dtype=torch.int64)
        plan = torch.zeros(1, plan_width(1, 0), dtype=torch.int32).expand(rows, -1)
        batch_rows = Rows(slots, slots, ancestors=ancestors, plan=plan)
        verify_replay.mamba2_verify(**inputs, **shared, rows=batch_rows, window=window, **how)
    else:
        inputs |= {"x": empty(1, heads, headdim).expand(rows, heads, headdim), "B": inputs["C"]}
        verify_slots.mamba2_verify_slots(**inputs, **shared, nodes=NodeSlots(slots, slots[:, None]))


KERNELS = {
    "verify_replay": "_mamba2_verify_kernel",
    "verify_slots": "_mamba2_slots_kernel",
    "fold": "_mamba2_fold_kernel",
}


@pytest.mark.parametrize(("rows", "heads", "headdim"), [(1024, 128, 80), (70_000, 1, 16), (1, 70_000, 16)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_and_heads_lie_along_the_first_axis(kernel, rows, heads, headdim, monkeypatch):
    recorder = Recorder()
    module = {"verify_replay": verify_replay, "verify_slots": verify_slots, "fold": fold}[kernel]
    monkeypatch.setattr(module, KERNELS[kernel], recorder)
    monkeypatch.setattr(verify_replay, "mamba2_verify_block_kernel", recorder)
    of_scores = Recorder()
    monkeypatch.setattr(scores, "_mamba2_scores_kernel", of_scores)
    launch(kernel, rows, heads, headdim)
    (grid,) = recorder.grids
    assert math.prod(grid) >= rows * heads
    streams = kernel == "verify_replay" and headdim > 16
    assert len(of_scores.grids) == streams
    assert all(math.prod(grid) >= rows for grid in of_scores.grids)
    for each in (grid, *of_scores.grids):
        assert all(programs <= OTHER_AXES for programs in each[1:]), each


@pytest.mark.parametrize("after_convolution", [False, True])
def test_only_after_a_convolution_are_tokens_looked_up_before_a_kernel_has_ended(after_convolution, monkeypatch):
    """Behind the kernel that makes the plan there would be no plan yet. With scores made before it, a verify waits for
    their kernel, which waits for that one."""
    of_block, of_stream, of_scores = Recorder(), Recorder(), Recorder()
    monkeypatch.setattr(verify_replay, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(verify_replay, "mamba2_verify_block_kernel", of_block)
    monkeypatch.setattr(verify_replay, "_mamba2_verify_kernel", of_stream)
    monkeypatch.setattr(scores, "_mamba2_scores_kernel", of_scores)
    launch("verify_replay", 4, 8, 32, after_convolution=after_convolution)
    (block,) = of_block.options
    assert block["OVERLAP"] and block["launch_pdl"] == after_convolution
    assert not of_stream.options and not of_scores.options
    launch("verify_replay", 1024, 8, 32, after_convolution=after_convolution)
    (stream,), (made,) = of_stream.options, of_scores.options
    assert made["OVERLAP"] and made["launch_pdl"] == after_convolution
    assert stream["OVERLAP"] and stream["launch_pdl"]


@pytest.mark.parametrize("after_convolution", [False, True])
def test_a_verify_that_makes_its_own_scores_starts_early_only_after_a_convolution(after_convolution, monkeypatch):
    of_stream, of_scores = Recorder(), Recorder()
    monkeypatch.setattr(verify_replay, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(verify_replay, "makes_scores_once", lambda *_: False)
    monkeypatch.setattr(verify_replay, "_mamba2_verify_kernel", of_stream)
    monkeypatch.setattr(scores, "_mamba2_scores_kernel", of_scores)
    launch("verify_replay", 1024, 8, 32, after_convolution=after_convolution)
    (stream,) = of_stream.options
    assert stream["OVERLAP"] and stream["launch_pdl"] == after_convolution
    assert not of_scores.options


@pytest.mark.parametrize(
    ("nodes", "heads", "narrow", "once"),
    [
        (4, 1024, False, True),
        (5, 1024, False, False),
        (8, 1024, False, False),
        (8, 4096, False, False),
        (8, 4224, False, True),
        (8, 1024, True, True),
        (9, 1024, False, True),
    ],
)
def test_few_programs_with_registers_left_make_their_own_scores(nodes, heads, narrow, once):
    tiling = verify_replay.default_tiling(
        headdim=80, dstate=128, nodes=nodes, fold_threshold=16, batch=heads // 128, nheads=128, narrow=narrow
    )
    assert verify_replay.makes_scores_once(tiling, nodes, heads) == once
    assert verify_replay.makes_scores_once(tiling._replace(num_warps=2), nodes, 1152)


@pytest.mark.parametrize(
    ("nodes", "window", "dstate", "batch", "block"),
    [
        (4, 16, 128, 1, True),
        (8, 16, 128, 3, True),
        (8, 16, 128, 4, False),
        (4, 16, 128, 7, True),
        (4, 16, 128, 8, False),
        (16, 16, 128, 1, False),  # too many nodes
        (8, 32, 128, 1, False),  # two tiles of tokens
        (4, 32, 128, 1, False),
        (4, 16, 256, 1, False),  # two warps
    ],
)
def test_a_kernel_of_its_own_for_what_one_warp_can_hold(nodes, window, dstate, batch, block):
    tiling = verify_replay.default_tiling(
        headdim=80, dstate=dstate, nodes=nodes, fold_threshold=window, batch=batch, nheads=128
    )
    _, later = verify_replay.token_tiles(window, nodes, dstate)
    assert verify_replay.is_for_a_block(tiling, nodes, later) == block
