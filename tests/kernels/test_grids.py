"""Grids of the launchers at 1,024 rows of 64 value heads, and of 48 layers: CUDA has no more than 65,535 programs along
the second and third axis. Tensors have no memory here and kernels are not run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from mamba_mtp_kernels.common import plan, tree
from mamba_mtp_kernels.common import window as bookkeeping
from mamba_mtp_kernels.common.grid import LIMITS
from mamba_mtp_kernels.common.operands import Folds, NodeSlots, Rows, States, plan_width
from mamba_mtp_kernels.conv1d import fold as conv_fold
from mamba_mtp_kernels.conv1d import verify_replay as conv_replay
from mamba_mtp_kernels.conv1d import verify_slots as conv_slots
from mamba_mtp_kernels.conv1d.window import ConvWindow
from mamba_mtp_kernels.gdn import fold, verify_replay, verify_slots
from mamba_mtp_kernels.gdn.window import GdnWindow

BATCH, NODES, LAYERS, THRESHOLD = 1024, 4, 48, 16
H, HV, K, V, DIM = 32, 64, 128, 128, 4096 + 4096 + 8192


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def integers(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return empty(*size, dtype=dtype)


def rows() -> Rows:
    links = {"parents": integers(BATCH, NODES), "ancestors": integers(BATCH, NODES, dtype=torch.int64)}
    given = {"plan": integers(BATCH, plan_width(NODES, THRESHOLD)), "schedule": integers(BATCH)}
    return Rows(integers(BATCH), integers(BATCH), **given, **links)


def nodes() -> NodeSlots:
    return NodeSlots(integers(BATCH), integers(BATCH, NODES))


def states(*leading: int) -> States:
    return States(empty(*leading, BATCH + 1, HV, V, K, dtype=torch.float32), integers(BATCH + 1, dtype=torch.uint8))


def window(*leading: int) -> GdnWindow:
    size = (*leading, BATCH, THRESHOLD + 2 * NODES)
    gates = {name: empty(*size, HV, dtype=torch.float32) for name in ("g", "beta")}
    gates["factors"] = empty(*size, HV, 3, dtype=torch.float32)
    inputs = {"k": empty(*size, H, K), "v": empty(*size, HV, V)}
    return GdnWindow(integers(BATCH + 1), integers(*size[-2:]), THRESHOLD, **inputs, **gates)


def gdn(verify: Callable[..., torch.Tensor], **where: object) -> None:
    tokens = BATCH * NODES
    inputs = {"q": empty(tokens, H, K), "a": empty(tokens, HV), "b": empty(tokens, HV)}
    verify(**inputs, A_log=empty(HV), dt_bias=empty(HV), scale=1.0, **where)


def by_substitution() -> verify_replay.VerifyConfig:
    return verify_replay.default_config(nodes=NODES, values=V, exact=False, fold_threshold=THRESHOLD, heads=BATCH * HV)


def gdn_slots() -> None:
    inputs = {"k": empty(BATCH * NODES, H, K), "v": empty(BATCH * NODES, HV, V)}
    gdn(verify_slots.gdn_verify_slots, states=states(), nodes=nodes(), **inputs)


def convolve(verify: Callable[..., torch.Tensor], **where: object) -> None:
    weights = {"weight": empty(DIM, 4), "bias": None, "activation": "silu"}
    verify(empty(BATCH * NODES, DIM), conv_states=empty(BATCH + 1, DIM, 3), **weights, **where)


def conv_window(*leading: int) -> ConvWindow:
    size = (*leading, BATCH, THRESHOLD + 2 * NODES)
    books = {name: integers(BATCH + 1) for name in ("newest", "length")}
    return ConvWindow(integers(BATCH + 1), integers(*size[-2:]), THRESHOLD, empty(*size, DIM), **books)


def parts() -> list[int | torch.Tensor]:
    kept = window()
    return [H * K, kept.k, kept.v]


def all_conv_states() -> torch.Tensor:
    return empty(LAYERS, BATCH + 1, DIM, 3)


def folds() -> Folds:
    return Folds(*(integers(BATCH) for _ in range(4)))


def gdn_fold() -> None:
    fold.gdn_fold(states(LAYERS), window(LAYERS), folds())


def build_tree() -> None:
    links = {name: integers(BATCH, NODES) for name in ("retrieve_next_token", "retrieve_next_sibling")}
    tree.build_tree(integers(BATCH, NODES), integers(BATCH, NODES, dtype=torch.int64), **links, batch=BATCH)


def commit_window() -> None:
    per_row = {name: integers(BATCH) for name in ("last_correct", "steps_to_track", "track_count", "lengths")}
    bookkeeping.commit_window(conv_window(), rows(), window_row=integers(BATCH + 1), **per_row)


LAUNCHES = {
    "build_tree": (tree, ("_build_tree_kernel",), build_tree, [BATCH]),
    "plan_rows": (
        plan,
        ("_plan_rows_kernel",),
        lambda: plan.plan_rows(conv_window(), rows(), nodes=NODES),
        [BATCH],
    ),
    "commit_window": (bookkeeping, ("_commit_window_kernel",), commit_window, [BATCH]),
    "gdn_verify": (
        verify_replay,
        ("prepare_products_kernel", "_verify_kernel"),
        lambda: gdn(verify_replay.gdn_verify, states=states(), rows=rows(), window=window()),
        [BATCH * HV, BATCH * HV],  # queries and folds of two heads a program each; a head's values in one program
    ),
    "gdn_verify by substitution": (
        verify_replay,
        ("prepare_kernel", "_verify_kernel"),
        lambda: gdn(verify_replay.gdn_verify, states=states(), rows=rows(), window=window(), config=by_substitution()),
        [BATCH * HV, BATCH * HV],
    ),
    "gdn_verify_slots": (
        verify_slots,
        ("_slots_kernel",),
        gdn_slots,
        [BATCH * HV * 16],
    ),
    "gdn_fold": (fold, ("_fold_kernel",), gdn_fold, [LAYERS * BATCH * HV * 4]),
    "conv1d_verify": (
        conv_replay,
        ("_conv1d_verify_kernel",),
        lambda: convolve(conv_replay.conv1d_verify, rows=rows(), window=conv_window()),
        [BATCH * DIM // 512],
    ),
    "conv1d_verify, in parts": (
        conv_replay,
        ("_conv1d_verify_kernel",),
        lambda: convolve(conv_replay.conv1d_verify, rows=rows(), window=conv_window(), parts=parts()),
        [BATCH * DIM // 512],
    ),
    "conv1d_verify_slots": (
        conv_slots,
        ("_conv1d_verify_slots_kernel",),
        lambda: convolve(conv_slots.conv1d_verify_slots, nodes=nodes()),
        [BATCH * DIM // 128],
    ),
    "fold_conv": (
        conv_fold,
        ("_fold_conv_kernel",),
        lambda: conv_fold.fold_conv(all_conv_states(), conv_window(LAYERS), folds()),
        [LAYERS * BATCH * DIM // 512],
    ),
    "commit_conv": (
        conv_fold,
        ("_fold_conv_kernel",),
        lambda: conv_fold.commit_conv(all_conv_states(), conv_window(LAYERS), rows()),
        [LAYERS * BATCH * DIM // 512],
    ),
}


def recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], dict[str, object]]]:
    """Grids and options of the launches."""
    module, kernels, launch, _ = LAUNCHES[name]
    launches = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: launches.append((grid, options))

    for kernel in kernels:
        monkeypatch.setattr(module, kernel, Recorder())
    launch()
    return launches


@pytest.mark.parametrize("name", LAUNCHES)
def test_grids_are_short_where_they_must_be(name, monkeypatch):
    grids = [grid for grid, _ in recorded(name, monkeypatch)]
    assert [math.prod(grid) for grid in grids] == LAUNCHES[name][-1]
    for grid in grids:
        assert all(size <= limit for size, limit in zip(grid, LIMITS, strict=False)), grid


EARLY = (
    "build_tree",
    "plan_rows",
    "commit_window",
    "conv1d_verify",
    "conv1d_verify, in parts",
    "fold_conv",
    "commit_conv",
)
"""Whose kernels start while the one before them runs, where a GPU can do so."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_who_is_launched_early_waits(name, monkeypatch):
    """(GDN's first kernel may wait for nobody and yet let the second one start.)"""
    monkeypatch.setattr(LAUNCHES[name][0], "has_dependent_launch", lambda _: True, raising=False)
    launches = [options for _, options in recorded(name, monkeypatch)]
    assert launches
    assert all(options["OVERLAP"] for options in launches if options.get("launch_pdl"))
    assert name not in EARLY or all(options["launch_pdl"] for options in launches)


def test_a_row_of_the_convolution_that_reaches_too_far_is_refused():
    x = torch.empty_strided((BATCH * NODES, DIM), (2**31 // NODES, 1), dtype=torch.bfloat16, device="meta")
    where = {"conv_states": empty(BATCH + 1, DIM, 3), "rows": rows(), "window": conv_window()}
    with pytest.raises(ValueError, match=r"x and window: a row's tokens reach over \d+ elements, expected fewer than"):
        conv_replay.conv1d_verify(x, weight=empty(DIM, 4), bias=None, activation="silu", **where)
