"""A verify's first half by products on tensor cores: against float64, and against prepare.py's substitution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mamba_mtp_kernels.gdn import prepare_products, verify_replay

from ..helpers import assert_close, assert_same_bits
from .case import WINDOWS, Case, make_case, with_books
from .checks import check_verify

VERIFY = verify_replay.gdn_verify


def small_case(nodes: int, **kwargs: Any) -> Case:
    """Of bf16, with rows that fold and rows that do not, and one of padding."""
    defaults = {
        "batch": 4, "tree": True, "H": 1, "HV": 2, "K": 32, "V": 32, "fold_threshold": 12, "pending": [3, 12, 0, 13],
        "padding": (2,), "dtype": torch.bfloat16, "strided": True,
    }  # fmt: skip
    return make_case(nodes=nodes, **{**defaults, **kwargs})


def taken(case: Case) -> bool:
    return prepare_products.can_take_products(case.tensors["q"], case.window(), case.books.nodes)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", range(1, 9))
def test_nodes(nodes: int, tree: bool, device: torch.device) -> None:
    case = small_case(nodes, tree=tree, seed=nodes, device=device)
    assert taken(case)
    check_verify(case, VERIFY)


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (1, 3), (2, 4), (1, 4), (1, 5)])
@pytest.mark.parametrize("nodes", [3, 6])
def test_head_groups(nodes: int, H: int, HV: int, device: torch.device) -> None:
    case = small_case(nodes, H=H, HV=HV, device=device)
    assert taken(case)
    check_verify(case, VERIFY)


@pytest.mark.parametrize("K", [32, 64, 96, 128])
def test_key_sizes(K: int, device: torch.device) -> None:
    case = small_case(5, K=K, device=device)
    assert taken(case)
    check_verify(case, VERIFY)


@pytest.mark.parametrize("fold_threshold", [0, 1, 7, 8, 9, 16])
@pytest.mark.parametrize("nodes", [4, 8])
def test_windows(nodes: int, fold_threshold: int, device: torch.device) -> None:
    """Every number of pending tokens that rows of such a window may have."""
    pending = [*range(fold_threshold + nodes + 1)]
    newest = [min(p // 2, fold_threshold) for p in pending]
    case = small_case(
        nodes, batch=len(pending), pending=pending, newest=newest, padding=(), fold_threshold=fold_threshold,
        device=device,
    )  # fmt: skip
    assert taken(case)
    check_verify(case, VERIFY)


def test_entries_beyond_a_lane_each(device: torch.device) -> None:
    """Five nodes in a window for sixteen, after more pending tokens than five nodes could have left."""
    large = small_case(16, pending=[3, 30, 0, 32], fold_threshold=16, device=device)
    tensors = {
        name: x.unflatten(0, (4, 16))[:, :5].flatten(0, 1) if name in ("q", "k", "v", "a", "b") else x
        for name, x in large.tensors.items()
    }
    parents, ancestors = (x[:, :5].contiguous() for x in (large.books.parents, large.books.ancestors))
    case = with_books(Case(large.books, tensors, large.scale), parents=parents, ancestors=ancestors)
    assert taken(case)
    check_verify(case, VERIFY)


def first_half(case: Case, monkeypatch: pytest.MonkeyPatch, products: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, HV, N, K] and y [B, HV, tokens, N] that a verify's first kernel hands to the second."""
    seen: list[Any] = []

    class Second:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: seen.extend(args)

    q = case.tensors["q"]
    config = verify_replay.default_config(
        nodes=case.books.nodes, values=case.tensors["v"].shape[-1], exact=False,
        fold_threshold=case.books.fold_threshold, products=products,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(verify_replay, "_verify_kernel", Second())
        case.run(VERIFY, config=config)
    carried, weights = seen[10], seen[11]
    assert carried.shape[1:] == (case.books.batch, case.tensors["a"].shape[1], case.books.nodes, q.shape[-1])
    return carried.double().sum(0).cpu(), weights.double().cpu()


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [4, 8])
def test_as_by_substitution(nodes: int, tree: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hand the same on, and append the same to the window; 16 bits of x, all of y that is not rounding."""
    kinds = {"K": 128, "tree": tree, "fold_threshold": 16, "pending": [16, 5, 0, 18], "device": device}
    case = small_case(nodes, **kinds)
    other = case.clone()
    (x, y), (want_x, want_y) = first_half(case, monkeypatch, True), first_half(other, monkeypatch, False)
    live = case.live()
    assert_close("x", x[live], want_x[live], 2e-5)
    slots = case.books.slots[live].long()
    tokens = nodes + case.books.pending[slots] - case.window().folding(slots)
    for row, count in zip(live.tolist(), tokens.tolist(), strict=True):
        assert_close(f"y of row {row}", y[row, :, :count], want_y[row, :, :count], 2e-6)
    for name in WINDOWS:
        ours, theirs = (c.tensors[name].float().cpu().nan_to_num(nan=3.0) for c in (case, other))
        assert_close(name, ours, theirs, 1e-6)


@pytest.mark.parametrize("nodes", [3, 7])
def test_order_of_programs_changes_no_bits(nodes: int, device: torch.device) -> None:
    case = small_case(nodes, pending=[3, 15, 0, 13], device=device)
    plain, ordered = case.clone(), case.clone()
    schedule = torch.tensor([3, 2, 1, 0, 77], dtype=torch.int32, device=device)
    assert_same_bits("o", ordered.run(VERIFY, schedule=schedule), plain.run(VERIFY))
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, ordered.tensors[name], plain.tensors[name])


def test_what_it_is_not_for(device: torch.device) -> None:
    """Those take prepare.py, and are right too."""
    for changes in (
        {"nodes": 9}, {"fold_threshold": 17}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"K": 48}, {"K": 160},
        {"fold_threshold": 12, "nodes": 4, "K": 36},
    ):  # fmt: skip
        case = small_case(**{"nodes": 4, "device": device, **changes})
        assert not taken(case), changes
        check_verify(case, VERIFY)


def test_it_bites(device: torch.device) -> None:
    """A wrong decay, strength, path or place of a pending token is seen by the checks above."""
    case = small_case(4, device=device)
    expected = case.clone().run(VERIFY).float()

    def differs(other: Case) -> bool:
        got = other.run(VERIFY).float()
        return bool((got - expected).abs().max() > 1e-2 * expected.abs().max())

    for factor in range(3):
        wrong = case.clone()
        wrong.tensors["window_factors"][..., factor] *= 1.5
        assert differs(wrong), factor
    order = case.books.order.clone()
    order[:, :2] = order[:, :2].flip(1)
    assert differs(with_books(case.clone(), order=order))
