"""Whole steps, verify and commit in turn, against a float64 state that every accepted token is applied to at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds
from mamba_mtp_kernels.common.reference import commit_window_reference
from mamba_mtp_kernels.gdn.reference import gdn_fold_reference, gdn_verify_reference
from mamba_mtp_kernels.gdn.window import GdnWindow

from ..helpers import (
    ancestors_of,
    assert_close,
    assert_same_bits,
    chain_parents,
    path_to,
    random_tree_parents,
    rms_ratio,
)
from .case import WINDOWS, Case, make_case, with_books
from .checks import FLOAT32_LIMIT, implementation


def plain_decode(state: torch.Tensor, case: Case, token: int, dtype: torch.dtype) -> torch.Tensor:
    """State [HV, V, K] after one token of the case, the plain recurrence in dtype."""
    x = {name: case.tensors[name].to(dtype) for name in ("k", "v", "a", "b", "A_log", "dt_bias")}
    k = x["k"][token] / torch.sqrt((x["k"][token] ** 2).sum(-1, keepdim=True) + 1e-6)
    k = k.repeat_interleave(state.shape[0] // k.shape[0], 0)
    g = -x["A_log"].exp() * torch.nn.functional.softplus(x["a"][token] + x["dt_bias"])
    state = state * g.exp()[:, None, None]
    delta = x["b"][token].sigmoid()[:, None] * (x["v"][token] - (state @ k[:, :, None])[:, :, 0])
    return state + delta[:, :, None] * k[:, None, :]


def run_steps(
    verify: Callable[..., torch.Tensor],
    *,
    steps: int,
    tree: bool,
    device: torch.device,
    batch: int = 2,
    nodes: int = 4,
    corrupt_rejected: bool = True,
    outputs: bool = True,
    fold: Callable[..., None] | None = None,
    seed: int = 0,
    **shape: object,
) -> dict[str, object]:
    """Verify and commit `steps` times with random paths.

    fold: windows keep their newest tokens, and after each commit the states of two commits ago, and of some length
    since then, are made in other slots and compared with float64's ("back": the worst error ratio).

    Returns the pools after the last step ("case"), the float64 states ("exact") and those of plain decode ("plain":
    float32 arithmetic, rounded to the pool's dtype after each token), and the worst output error ratio ("o").
    """
    generator = torch.Generator().manual_seed(seed)
    none = [0] * batch
    newest = None if fold is None else none
    case = make_case(batch=batch, nodes=nodes, pending=none, newest=newest, device=device, seed=seed, **shape)
    slots = case.books.slots.long()
    state_dtype = case.tensors["checkpoint"].dtype
    exact = case.tensors["checkpoint"][slots].cpu().double()
    plain = case.tensors["checkpoint"][slots].cpu().float()
    worst = worst_back = 0.0
    reached = [[exact[b].clone()] for b in range(batch)]  # by length
    lengths = [torch.zeros(batch, dtype=torch.int32)]  # by step
    for step in range(steps):
        fresh = make_case(batch=batch, nodes=nodes, pending=[0] * batch, device=device, seed=seed + 1 + step, **shape)
        for name in ("q", "k", "v", "a", "b"):
            case.tensors[name] = fresh.tensors[name]
        parents = random_tree_parents(batch, nodes, generator) if tree else chain_parents(batch, nodes)
        case = _with_tree(case, parents, device)
        on_cpu = _inputs_on_cpu(case)
        out = case.run(verify)
        last = torch.randint(0, nodes, (batch,), generator=generator)
        positions = case.node_positions()
        for b in range(batch):
            if outputs:
                worst = max(worst, _output_error(exact[b], on_cpu, out, b, nodes, parents[b].tolist()))
            for i in path_to(parents[b].tolist(), int(last[b])):
                exact[b] = plain_decode(exact[b], on_cpu, b * nodes + i, torch.float64)
                if fold is not None:
                    reached[b].append(exact[b].clone())
                plain[b] = plain_decode(plain[b], on_cpu, b * nodes + i, torch.float32).to(state_dtype).float()
            if corrupt_rejected:
                accepted = path_to(parents[b].tolist(), int(last[b]))
                rejected = [i for i in range(nodes) if i not in accepted]
                for name in WINDOWS:
                    case.tensors[name][positions[0][b, rejected], positions[1][b, rejected]] = math.nan
        commit_window_reference(
            case.window(),
            case.books.batch_rows,
            window_row=case.books.window_row,
            last_correct=last.to(device),
            steps_to_track=None,
            track_count=torch.zeros(batch, dtype=torch.int32, device=device),
            lengths=None if fold is None else lengths[-1].to(device),
        )
        lengths.append(lengths[-1] + torch.tensor([depth_of(parents[b], int(last[b])) for b in range(batch)]).int())
        if fold is not None:
            assert_same_bits("length", case.books.length[slots], lengths[-1])
            since = lengths[max(step - 1, 0)]
            between = torch.rand(batch, generator=generator) * (lengths[-1] - since + 1)
            for wanted in (since, since + between.int()):
                expected = torch.stack([reached[b][int(wanted[b])] for b in range(batch)])
                worst_back = max(worst_back, rms_ratio(state_at(case, fold, wanted), expected))
    return {"case": case, "exact": exact, "plain": plain, "o": worst, "back": worst_back}


def depth_of(parents: torch.Tensor, node: int) -> int:
    """Nodes from the root to `node`, both counted."""
    return len(path_to(parents.tolist(), node))


def state_at(case: Case, fold: Callable[..., None], lengths: torch.Tensor) -> torch.Tensor:
    """The batch's states at these lengths, made in slots that nobody has."""
    books, slots = case.books, case.books.slots.long()
    taken = set(slots.tolist())
    free = [slot for slot in range(1, books.pending.shape[0]) if slot not in taken][: len(taken)]
    others = torch.tensor(free, device=slots.device)
    counts = lengths.to(slots.device) - (books.length[slots] - books.pending[slots])
    assert (counts >= 0).all(), "a state wanted is gone"
    case.fold(fold, Folds(slots, others, books.rows.long(), counts.long()))
    return case.tensors["checkpoint"][others].cpu()


def _with_tree(case: Case, parents: torch.Tensor, device: torch.device) -> Case:
    books = case.books
    books.parents, books.ancestors = parents.to(device), ancestors_of(parents).to(device)
    return case


def _inputs_on_cpu(case: Case) -> Case:
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
    return Case(case.books, {name: case.tensors[name].cpu() for name in names}, case.scale)


def _output_error(state: torch.Tensor, case: Case, out: torch.Tensor, b: int, nodes: int, parents: list[int]) -> float:
    states: list[torch.Tensor] = []
    want = []
    for i in range(nodes):
        above = state if parents[i] < 0 else states[parents[i]]
        states.append(plain_decode(above, case, b * nodes + i, torch.float64))
        q = case.tensors["q"][b * nodes + i].double()
        q = (q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(state.shape[0] // q.shape[0], 0)
        want.append(case.scale * (states[i] @ q[:, :, None])[:, :, 0])
    return rms_ratio(out[b * nodes : (b + 1) * nodes], torch.stack(want))


def settle(case: Case, fold: Callable[..., None]) -> torch.Tensor:
    """Fold all that is pending; the batch's states, on the CPU."""
    books, slots = case.books, case.books.slots.long()
    case.fold(fold, replace(books.settling(), rows=books.window_row[slots]))
    books.pending[slots] = 0
    return case.tensors["checkpoint"][slots].cpu()


@pytest.mark.in_turn
@pytest.mark.parametrize("which", ["triton", "reference"])
@pytest.mark.parametrize("fold_threshold", [0, 5])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_steps(which: str, tree: bool, fold_threshold: int, device: torch.device) -> None:
    """Outputs of every step and the settled states; what was rejected is NaN by the next step."""
    verify, fold = implementation(which, device)
    steps = 30 if device.type == "cuda" else 6
    shape = {"H": 1, "HV": 2, "K": 16, "V": 16, "fold_threshold": fold_threshold}
    result = run_steps(verify, steps=steps, tree=tree, device=device, **shape)
    assert result["o"] <= 1e-5, result["o"]
    assert_close("state", settle(result["case"], fold), result["exact"], FLOAT32_LIMIT)


@pytest.mark.parametrize("which", ["triton", "reference"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_steps_back(which: str, tree: bool, device: torch.device) -> None:
    """Windows that keep their newest tokens: with a step too many committed, the one before it can be cut as well."""
    verify, fold = implementation(which, device)
    steps = 30 if device.type == "cuda" else 8
    shape = {"H": 1, "HV": 2, "K": 16, "V": 16, "fold_threshold": 4}
    result = run_steps(verify, steps=steps, tree=tree, device=device, fold=fold, **shape)
    assert result["o"] <= 1e-5, result["o"]
    assert result["back"] <= FLOAT32_LIMIT, result["back"]
    assert_close("state", settle(result["case"], fold), result["exact"], FLOAT32_LIMIT)


@pytest.mark.parametrize("too_far", ["newest forgotten", "one token"])
def test_a_fold_too_far_is_noticed(too_far: str, device: torch.device) -> None:
    """By the states wanted alone: outputs and settled states stay right where every party folds too far."""
    shape = {"H": 1, "HV": 2, "K": 16, "V": 16, "fold_threshold": 4}

    def verify(*args: torch.Tensor, window: GdnWindow, **kwargs: object) -> torch.Tensor:
        if too_far == "newest forgotten":
            window.newest.zero_()
        else:
            window.newest.copy_((window.newest - 1).clamp(min=0))
        return gdn_verify_reference(*args, window=window, **kwargs)

    with pytest.raises(AssertionError, match="a state wanted is gone"):
        run_steps(verify, steps=12, tree=False, device=device, fold=gdn_fold_reference, **shape)


@pytest.mark.in_turn
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drift(state_dtype: torch.dtype, device: torch.device) -> None:
    """After thousands of commits the state is no further from float64 than plain decode's, one token at a time."""
    on_gpu = device.type == "cuda"
    verify, fold = (gdn_verify_reference, gdn_fold_reference) if not on_gpu else implementation("triton", device)
    result = run_steps(
        verify, steps=4096 if on_gpu else 1024, tree=False, device=device, batch=1, outputs=False, seed=5,
        H=1, HV=1, K=16, V=16, fold_threshold=8, state_dtype=state_dtype, gate_shift=-6.0,
    )  # fmt: skip
    exact = result["exact"]
    ours, plain = rms_ratio(settle(result["case"], fold), exact), rms_ratio(result["plain"], exact)
    assert ours <= 1.2 * plain, f"error {ours:.2e}, plain decode's {plain:.2e}"


def test_sabotaged_commit_is_noticed(device: torch.device) -> None:
    """The comparison above fails when the bookkeeping is off by one token, either way, or the order is not kept."""
    case = make_case(batch=2, nodes=4, H=1, HV=2, pending=[4, 6], fold_threshold=6, device=device)
    slots = case.books.slots.long()
    for window in WINDOWS:
        filled = case.tensors[window]
        case.tensors[window] = torch.where(filled.isnan(), torch.full_like(filled, 0.5), filled)
    clean, _ = case.oracle()
    for change in (-1, 1):
        pending = case.books.pending.clone()
        pending[slots] += change
        assert rms_ratio(with_books(case, pending=pending).run(gdn_verify_reference), clean) > 1e-3
    swapped = case.books.order.clone()
    swapped[:, [0, 2]] = swapped[:, [2, 0]]
    assert rms_ratio(with_books(case, order=swapped).run(gdn_verify_reference), clean) > 1e-3
