"""A verify's first half by products on tensor cores: against float64, and against prepare.py's substitution."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mamba_mtp_kernels.gdn import prepare_products, verify_replay

from ..helpers import assert_close, assert_same_bits, rms_ratio, run_compiling
from .case import WINDOWS, Case, make_case, with_books
from .checks import check_verify

pytestmark = pytest.mark.in_turn

VERIFY = verify_replay.gdn_verify


def small_case(nodes: int, **kwargs: Any) -> Case:
    """Of bf16, with rows that fold and rows that do not, and one of padding."""
    defaults = {
        "batch": 4, "tree": True, "H": 1, "HV": 2, "K": 32 if nodes <= 8 else 64, "V": 32, "fold_threshold": 12,
        "pending": [3, 12, 0, 13], "padding": (2,), "dtype": torch.bfloat16, "strided": True,
    }  # fmt: skip
    return make_case(nodes=nodes, **{**defaults, **kwargs})


def taken(case: Case) -> bool:
    return prepare_products.can_take_products(case.tensors["q"], case.window(), case.books.nodes)


@pytest.mark.in_turn
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [*range(1, 9), 9, 12, 15, 16])
def test_nodes(nodes: int, tree: bool, device: torch.device) -> None:
    case = small_case(nodes, tree=tree, seed=nodes, device=device)
    assert taken(case)
    check_verify(case, VERIFY)


@pytest.mark.in_turn
@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (1, 3), (2, 4), (1, 4), (1, 5)])
@pytest.mark.parametrize("nodes", [3, 6, 10])
def test_head_groups(nodes: int, H: int, HV: int, device: torch.device) -> None:
    case = small_case(nodes, H=H, HV=HV, device=device)
    assert taken(case)
    check_verify(case, VERIFY)


@pytest.mark.in_turn
@pytest.mark.parametrize("K", [32, 64, 96, 128])
@pytest.mark.parametrize("nodes", [5, 11])
def test_key_sizes(nodes: int, K: int, device: torch.device) -> None:
    case = small_case(nodes, K=K, device=device)
    assert taken(case)
    check_verify(case, VERIFY)


def pending_counts(nodes: int, fold_threshold: int, device: torch.device) -> list[int]:
    """What rows of a window may have pending: all of it where a GPU runs or there are few, else what fills a block of
    eight, one token more and one fewer, and windows that fold."""
    counts = range(fold_threshold + nodes + 1)
    if device.type == "cuda" or len(counts) <= 18:
        return [*counts]
    edges = {fold_threshold + 1, (fold_threshold + counts[-1]) // 2, counts[-1]}
    return [p for p in counts if p in edges or (p <= fold_threshold and p % 8 in (0, 1, 7))]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("nodes", "fold_threshold"), [*itertools.product([4, 8], [0, 1, 7, 8, 9, 16]), (9, 0), (10, 17), (16, 20), (16, 24)]
)
def test_windows(nodes: int, fold_threshold: int, device: torch.device) -> None:
    """Rows with as many pending tokens as such a window may have (`pending_counts`)."""
    pending = pending_counts(nodes, fold_threshold, device)
    newest = [min(p // 2, fold_threshold) for p in pending]
    case = small_case(
        nodes, batch=len(pending), pending=pending, newest=newest, padding=(), fold_threshold=fold_threshold,
        HV=2 if nodes <= 8 else 1, device=device,
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


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        (4, {"K": 128, "tree": False}),
        (8, {"K": 128}),
        (3, {"H": 2, "HV": 6, "K": 96}),
        (6, {"H": 2, "HV": 6, "K": 64}),
        (1, {"HV": 1, "pending": [16, 5, 0, 17]}),
        (5, {"HV": 5, "fold_threshold": 7, "pending": [7, 1, 0, 9]}),
        (2, {"fold_threshold": 0, "pending": [0, 2, 0, 1]}),
        (16, {"K": 128, "fold_threshold": 20, "pending": [20, 5, 0, 25]}),
        (9, {"H": 2, "HV": 6, "K": 64, "fold_threshold": 24, "pending": [24, 5, 0, 31]}),
        (13, {"K": 96, "tree": False}),
    ],
    ids=str,
)
def test_as_by_substitution(
    nodes: int, kinds: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hand the same on, and append the same to the window; 16 bits of x, all of y that is not rounding."""
    kinds = {"fold_threshold": 16, "pending": [16, 5, 0, 18], "device": device, **kinds}
    case = small_case(nodes, **kinds)
    other = case.clone()
    (x, y), (want_x, want_y) = first_half(case, monkeypatch, True), first_half(other, monkeypatch, False)
    live = case.live()
    scale = want_x[live].abs().max()
    assert_close("x", x[live], want_x[live], 2e-5)
    assert ((x - want_x)[live].abs().max() < 5e-5 * scale).item()
    slots = case.books.slots[live].long()
    tokens = nodes + case.books.pending[slots] - case.window().folding(slots)
    for row, count in zip(live.tolist(), tokens.tolist(), strict=True):
        assert_close(f"y of row {row}", y[row, :, :count], want_y[row, :, :count], 2e-6)
        assert_close(f"newest y of row {row}", y[row, :, count - 1], want_y[row, :, count - 1], 5e-6)
    for name in WINDOWS:
        ours, theirs = (c.tensors[name].float().cpu().nan_to_num(nan=3.0) for c in (case, other))
        assert_close(name, ours, theirs, 1e-6)


def test_keys_that_erase_the_query(device: torch.device) -> None:
    """What is left of a query, times a state a thousand times what is written: its bits count, not the query's."""
    case = make_case(
        batch=2, nodes=4, H=1, HV=2, K=128, V=32, fold_threshold=16, pending=[12, 12], dtype=torch.bfloat16,
        same_keys=True, beta_logit=20.0, gate_shift=-20.0, seed=3, device=device,
    )  # fmt: skip
    case.tensors["q"] = case.tensors["k"].clone()
    case.tensors["checkpoint"] = case.tensors["checkpoint"] * 1000
    assert taken(case)
    config = verify_replay.default_config(nodes=4, values=32, exact=False, fold_threshold=16)
    want, _ = case.oracle()
    errors = [rms_ratio(case.clone().run(VERIFY, config=each).float(), want) for each in (None, config)]
    assert errors[0] < 1.1 * errors[1], errors


def test_spaced_tokens(device: torch.device) -> None:
    """Tokens of a window with gaps between them, and gates whose tokens lie elsewhere than q's."""
    case = small_case(5, H=2, HV=4, device=device)
    for name, gap in (("window_k", 16), ("window_g", 3), ("window_beta", 3), ("window_factors", 5)):
        tensor = case.tensors[name]
        wide = tensor.new_full((*tensor.shape[:2], tensor[0, 0].numel() + gap), torch.nan)
        spaced = wide[:, :, : tensor[0, 0].numel()].unflatten(2, tensor.shape[2:])
        spaced.copy_(tensor)
        case.tensors[name] = spaced
    for name, gap in (("a", 7), ("b", 1)):
        tensor = case.tensors[name]
        wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + gap), torch.nan)
        wide[:, : tensor.shape[1]] = tensor
        case.tensors[name] = wide[:, : tensor.shape[1]]
    assert taken(case)
    expected, _ = case.oracle()
    got = case.run(VERIFY)
    tokens = case.live_tokens()
    assert_close("o", got.cpu()[tokens], expected.cpu()[tokens], 2e-2)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes_beside_it(index_dtype: torch.dtype, device: torch.device) -> None:
    """Indices, and gates in other types than keys."""
    case = small_case(3, index_dtype=index_dtype, device=device)
    for name, dtype in (
        ("a", torch.float32),
        ("b", torch.float32),
        ("A_log", torch.bfloat16),
        ("dt_bias", torch.bfloat16),
    ):
        case.tensors[name] = case.tensors[name].to(dtype)
    assert taken(case)
    check_verify(case, VERIFY)


@pytest.mark.in_turn
@pytest.mark.parametrize("nodes", [3, 7, 12])
def test_order_of_programs_changes_no_bits(nodes: int, device: torch.device) -> None:
    case = small_case(nodes, H=2, HV=6, pending=[3, 15, 0, 13], device=device)
    plain, ordered = case.clone(), case.clone()
    schedule = torch.tensor([3, 2, 1, 0, 77], dtype=torch.int32, device=device)
    assert_same_bits("o", ordered.run(VERIFY, schedule=schedule), plain.run(VERIFY))
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, ordered.tensors[name], plain.tensors[name])


def test_what_it_is_not_for(device: torch.device) -> None:
    """Those take prepare.py, and are right too."""
    for changes in (
        {"nodes": 17}, {"nodes": 16, "fold_threshold": 25}, {"fold_threshold": 17}, {"dtype": torch.float16},
        {"dtype": torch.float32}, {"K": 48}, {"K": 160}, {"fold_threshold": 12, "nodes": 4, "K": 36},
    ):  # fmt: skip
        case = small_case(**{"nodes": 4, "device": device, **changes})
        assert not taken(case), changes
        check_verify(case, VERIFY)
    # a fold of two steps, which a window for more than 16 nodes takes
    case = small_case(20, pending=[3, 12, 0, 30], device=device)
    assert not prepare_products.can_take_products(case.tensors["q"], case.window(), 5)
    # queries, and tokens of a window, that do not begin at multiples of 16 bytes
    case = small_case(4, device=device)
    q = torch.empty(case.tensors["q"].numel() + 4, dtype=torch.bfloat16, device=device)[4:].view_as(case.tensors["q"])
    assert not prepare_products.can_take_products(q, case.window(), 4)
    spaced = case.clone()
    k = spaced.tensors["window_k"]
    wide = torch.empty(*k.shape[:2], k[0, 0].numel() + 4, dtype=k.dtype, device=device)
    spaced.tensors["window_k"] = wide[:, :, : k[0, 0].numel()].unflatten(2, k.shape[2:])
    assert not taken(spaced)


def test_a_lane_holds_an_element() -> None:
    """All instructions between lanes name them by that: compiled, every tensor that they take or give lies so."""
    run = run_compiling(f"{__package__}.lane_layouts")
    assert run.returncode == 0, run.stderr[-2000:]
    found = run.stdout.splitlines()
    assert len(found) == 3, found
    for layout in found:
        assert "sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [1]" in layout, layout


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
