"""The fold as products: its arithmetic in plain torch, its factors, its drift, and one result whoever folds."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from mamba_mtp_kernels.common.operands import Folds, States
from mamba_mtp_kernels.gdn.fold import gdn_fold
from mamba_mtp_kernels.gdn.fold_tile import key_products, step_factors, step_tokens
from mamba_mtp_kernels.gdn.reference import token_factors
from mamba_mtp_kernels.gdn.verify_replay import gdn_verify
from mamba_mtp_kernels.gdn.window import GdnWindow

from ..helpers import (
    DTYPE_PAIRS,
    FOLDING,
    assert_close,
    assert_same_bits,
    folded_by,
    rms_ratio,
    run_compiling,
    settled_by,
)
from .case import WINDOWS, make_case
from .slots_case import turned

pytestmark = pytest.mark.in_turn


# ------------------------------------------------------------------------------------------------- the arithmetic


class Tokens(NamedTuple):
    """Of one head: raw k [T, K] and v [T, V] bf16, g and beta [T] float32."""

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


KINDS = ("weak decay", "strong decay", "alike keys")


def draw(generator: torch.Generator, kind: str, count: int = 9, K: int = 32, V: int = 16) -> Tokens:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    k, beta = randn(count, K), torch.rand(count, generator=generator)
    decay = 3.0 if kind == "strong decay" else 0.01
    if kind == "alike keys":
        k, beta = randn(1, K) + 0.05 * k, 0.9 + 0.1 * beta
    return Tokens(k.bfloat16(), randn(count, V).bfloat16(), -decay * torch.rand(count, generator=generator), beta)


def cut(x: torch.Tensor) -> torch.Tensor:
    """x float32 without the bits that bf16 has not got."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def in_addends(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """x float32 as `count` bf16 numbers (held in float32), the smallest first."""
    parts, rest = [], x.contiguous()
    for _ in range(count - 1):
        parts.append(cut(rest))
        rest = rest - parts[-1]
    return [rest.bfloat16().float(), *reversed(parts)]


def emulated_fold(state: torch.Tensor, tokens: Tokens, count: int = 3) -> torch.Tensor:
    """One fold as on tensor cores, state [V, K] float32: `count` addends of what stands beside the keys."""
    k, v = tokens.k.float(), tokens.v.float()
    total = tokens.g.double().sum()
    kept, to_end = total.exp().float(), (total - tokens.g.double().cumsum(0)).exp().float()
    gram = k @ k.T
    norm = torch.rsqrt(tokens.k.double().square().sum(1) + 1e-6).float()
    coupling = (gram * (norm[:, None] * norm) * tokens.beta[:, None]).tril(-1)
    inverse = torch.eye(len(k))
    for done in range(len(k) - 1):
        inverse = inverse - coupling[:, done, None] * inverse[done]
    solve = (norm[:, None] * inverse).tril(-1).T
    product = sum(part @ k.T for part in in_addends(state, count))
    given = v.T * (tokens.beta * to_end) - product * (tokens.beta * norm * kept)
    coupled = sum(a @ b for a in in_addends(given, count) for b in in_addends(solve, count))
    weight = given * norm + coupled
    added = sum(part @ k for part in in_addends(weight, count))
    return (state.double() * kept + added.double()).float()


def plain_fold(state: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Token by token in the dtype of state, as plain decode."""
    dtype = state.dtype
    for k, v, g, beta in zip(*(x.to(dtype) for x in tokens), strict=True):
        k = k / torch.sqrt((k * k).sum() + 1e-6)
        state = state * g.exp()
        state = state + (beta * (v - state @ k))[:, None] * k
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 9, 16])
def test_one_fold_is_as_exact_as_float32(kind, count):
    generator = torch.Generator().manual_seed(count)
    state, tokens = torch.randn(16, 32, generator=generator), draw(generator, kind, count)
    exact = plain_fold(state.double(), tokens)
    product = rms_ratio(emulated_fold(state, tokens), exact)
    assert product <= 2e-7, product
    # an addend less is seen
    assert rms_ratio(emulated_fold(state, tokens, count=2), exact) > 4 * product


# ------------------------------------------------------------------------------------------------------ the factors


@triton.jit
def _factors_kernel(order, k, g, beta, out, count, K: tl.constexpr, PART: tl.constexpr, NATIVE: tl.constexpr):
    position, live = step_tokens(0, count, order)
    products = key_products(k, K, position, live, K, K // PART, PART, NATIVE)
    of_value, of_product, norm, solve, kept = step_factors(products, g, beta, 1, position, live)
    t = tl.arange(0, 16)
    tl.store(out + t, of_value)
    tl.store(out + 16 + t, of_product)
    tl.store(out + 32 + t, norm)
    tl.store(out + 48 + t[:, None] * 16 + t[None, :], solve)
    tl.store(out + 304, kept)


@pytest.mark.parametrize("kind", [*KINDS, "one key, full strength"])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_factors_solve_the_system(kind, count, device):
    generator = torch.Generator().manual_seed(count)
    tokens = draw(generator, kind, count)
    if kind == "one key, full strength":
        tokens = tokens._replace(k=tokens.k[:1].expand(count, -1).contiguous(), beta=torch.ones(count))
    order = torch.randperm(20, generator=generator).int()
    window = Tokens(*(torch.full((20, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in tokens))
    for held, given in zip(window, tokens, strict=True):
        held[order[:count].long()] = given
    out = torch.full((305,), float("nan"), device=device)
    k, _, g, beta = (x.to(device) for x in window)
    native = not triton.knobs.runtime.interpret
    _factors_kernel[(1,)](order.to(device), k, g, beta, out, count, 32, 16, native, num_warps=1)
    of_value, of_product, norm, solve, kept = out.cpu().double().split([16, 16, 16, 256, 1])

    k, _, g, beta = (x.double() for x in tokens)
    r = torch.rsqrt((k * k).sum(1) + 1e-6)
    system = torch.eye(count) + ((k @ k.T) * (r[:, None] * r) * beta[:, None]).tril(-1)
    exact = torch.linalg.solve_triangular(system, torch.diag(r), upper=False, left=False).T
    for name, got, want in (
        ("of value", of_value, beta * (g.sum() - g.cumsum(0)).exp()),
        ("of product", of_product, -beta * r * g.sum().exp()),
        ("norm", norm, r.float().double()),
        ("kept", kept, g.sum().exp()[None]),
        ("X", solve.view(16, 16)[:count, :count] + torch.diag(norm[:count]), exact),
    ):
        assert_close(name, got[: len(want)], want, 3e-8 if name == "norm" else 3e-7)
        assert not got[len(want) :].any(), f"{name} beyond the tokens"
    assert not solve.view(16, 16)[count:].any() and not solve.view(16, 16)[:, count:].any()


# ----------------------------------------------------------------------------------------------------------- drift


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.once) for kind in KINDS[:2]), KINDS[2]])
def test_folds_drift_no_more_than_plain_decode(kind, device):
    """One rounding a fold beats two a token: after 1, 16 and 256 folds of 9 tokens."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(16, 32, generator=generator)
    ours, exact = plain[None, None, None].expand(1, 2, 1, 16, 32).contiguous().to(device), plain.double()
    order = torch.arange(9, dtype=torch.int32, device=device)[None]
    pending, one, row = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 1, 0))
    for fold in range(1, 257):
        tokens = draw(generator, kind)
        plain, exact = plain_fold(plain, tokens), plain_fold(exact, tokens)
        k, v = (x[None, None, :, None].to(device) for x in tokens[:2])
        g, beta = (x[None, None, :, None].to(device) for x in tokens[2:])
        window = GdnWindow(pending.expand(2).contiguous(), order, 0, k, v, g, beta, token_factors(k, g, beta))
        gdn_fold(States(ours), window, Folds(one, one, row, torch.full_like(one, 9)))
        if fold in (1, 16, 256):
            product, today = rms_ratio(ours[0, 1, 0], exact), rms_ratio(plain, exact)
            # (strong decay forgets: both stay at one fold's rounding)
            assert product <= max(today, 1.2e-7), f"{fold} folds: {product:.2e}, token by token {today:.2e}"


# ------------------------------------------------------------------------------------------------- whoever folds


settle = partial(settled_by, gdn_fold)


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [*FOLDING, {"K": 40, "V": 33, "H": 1, "HV": 2}], ids=str)
@DTYPE_PAIRS
def test_fold_then_verify_has_the_bits_of_a_verify_that_folds(dtype, state_dtype, options, device):
    given = {"batch": 3, "nodes": 4, "tree": True, "H": 1, "HV": 1, "fold_threshold": 8, "pending": [9, 12, 10]}
    folding = make_case(**given | options, dtype=dtype, state_dtype=state_dtype, device=device)
    settled = folding.clone()
    o = folding.run(gdn_verify)
    folded_by(gdn_fold, settled)
    assert_same_bits("checkpoint", settled.tensors["checkpoint"], folding.tensors["checkpoint"])
    assert_same_bits("o", settled.run(gdn_verify), o)


def test_products_sum_in_one_order_however_many_steps_fold():
    """What the interpreter cannot show: of float32 factors the compiler chooses the order, kernel by kernel."""
    run = run_compiling(f"{__package__}.product_orders")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert run.stdout.count("kWidth") == 3, run.stdout


def test_settle_has_a_verifys_bits_in_either_axis_order(device):
    folding = make_case(batch=3, nodes=3, H=1, HV=2, pending=[7, 9, 8], dtype=torch.bfloat16, K=32, device=device)
    pool, slots = folding.tensors["checkpoint"], folding.books.slots[:2].long()
    order = torch.zeros(pool.shape[0], dtype=torch.uint8, device=device)
    order[slots] = 1
    for slot in slots.tolist():
        pool[slot] = turned(pool[slot])
    settled = folding.clone()
    folding.run(gdn_verify, axis_order=order)
    settle(settled, order)
    assert_same_bits("checkpoint", settled.tensors["checkpoint"], folding.tensors["checkpoint"])


def test_a_snapshot_has_the_bits_of_settling_in_place(device):
    case = make_case(batch=3, nodes=3, H=1, HV=2, pending=[3, 9, 6], dtype=torch.bfloat16, device=device)
    taken, slots = case.clone(), case.books.slots.tolist()
    free = [slot for slot in range(1, case.books.pending.shape[0]) if slot not in slots][:3]
    settle(taken, dst=torch.tensor(free, dtype=torch.int32, device=device))
    settle(case)
    assert_same_bits("states", taken.tensors["checkpoint"][free], case.tensors["checkpoint"][case.books.slots.long()])


def test_the_windows_size_changes_no_bits(device):
    """The same tokens in a window that holds more: only zeros are added."""
    given = {"batch": 3, "nodes": 4, "H": 1, "HV": 2, "pending": [9, 12, 10], "dtype": torch.bfloat16, "device": device}
    small, large = (make_case(**given, fold_threshold=threshold) for threshold in (8, 40))
    large.tensors |= {name: x.clone() for name, x in small.tensors.items() if name not in WINDOWS}
    large.books.slots, large.books.pending = small.books.slots, small.books.pending.clone()
    for b in range(3):
        count = small.books.pending_of(b)
        row, wide = int(small.books.rows[b]), int(large.books.rows[b])
        at, to = small.books.order[row, :count].long(), large.books.order[wide, :count].long()
        for name in WINDOWS:
            large.tensors[name][wide, to] = small.tensors[name][row, at]
    settle(large)
    small.run(gdn_verify)
    assert_same_bits("checkpoint", large.tensors["checkpoint"], small.tensors["checkpoint"])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_what_a_fold_leaves_pending_is_read_as_a_waiting_rows_is(tree, device):
    given = {"batch": 3, "nodes": 4, "tree": tree, "H": 1, "HV": 2, "dtype": torch.bfloat16, "device": device}
    ours = make_case(**given, fold_threshold=16, pending=[17, 20, 5], newest=[2, 1, 3])
    assert [ours.books.folding(b) for b in range(3)] == [15, 16, 0]
    settled = ours.clone()
    folded_by(gdn_fold, settled)
    o = ours.run(gdn_verify)
    assert_same_bits("o", settled.run(gdn_verify), o)
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, settled.tensors[name], ours.tensors[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("state_dtype", "dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
    ids=["state_dtype0", "state_dtype1", "float16"],
)
def test_settle_has_a_verifys_bits_at_model_heads(state_dtype, dtype, device):
    for nodes, window, batch in (
        (4, 8, 6),
        (8, 16, 6),
        (8, 8, 24),
        (4, 16, 24),
        (16, 16, 24),
        (16, 20, 24),
        (32, 32, 6),
    ):
        counts = [window + 1, window + nodes, 0, window, window + 2, 3]
        folding = make_case(
            batch=batch, nodes=nodes, tree=True, H=16, HV=32, K=128, V=128, fold_threshold=window,
            pending=counts * (batch // 6), dtype=dtype, state_dtype=state_dtype, device=device,
        )  # fmt: skip
        settled = folding.clone()
        o = folding.run(gdn_verify)
        folded_by(gdn_fold, settled)
        assert_same_bits("checkpoint", settled.tensors["checkpoint"], folding.tensors["checkpoint"])
        assert_close("o", settled.run(gdn_verify), o, 1e-7)
