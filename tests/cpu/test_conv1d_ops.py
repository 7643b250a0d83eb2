"""Causal conv1d on CPU against a per-token float64 loop, and the tree links it turns into parents."""

from __future__ import annotations

import pytest
import torch

from sglang_mamba_mtp.cpu import conv1d_ops
from sglang_mamba_mtp.cpu._tree import parents_from_links

from . import oracles
from .test_gdn_ops import TREES

DIM, WIDTH = 7, 4


def problem(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=gen)
    weight, bias = torch.randn(DIM, WIDTH, generator=gen), torch.randn(DIM, generator=gen)
    return x, weight, bias, torch.randn(9, DIM, WIDTH - 1, generator=gen)


@pytest.mark.parametrize("lens", [[1], [2, 5, 1], [30, 3]])
def test_prefill(lens: list[int]):
    x, weight, bias, pool = problem(DIM, sum(lens), seed=sum(lens))
    before = pool.clone()
    slots = torch.tensor([4, 7, 1][: len(lens)])
    keeps = torch.tensor([True, False, True][: len(lens)])
    bounds = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()])
    y = conv1d_ops.causal_conv1d_fn_cpu(
        x, weight, bias, pool, bounds, cache_indices=slots, has_initial_state=keeps, activation="silu"
    )
    for i, slot in enumerate(slots.tolist()):
        window = before[slot] if keeps[i] else torch.zeros(DIM, WIDTH - 1)
        for t in range(int(bounds[i]), int(bounds[i + 1])):
            want, window = oracles.conv1d_step(window, x[:, t], weight, bias)
            assert oracles.relative(y[:, t], want) < 1e-6
        torch.testing.assert_close(pool[slot], window.float(), rtol=0, atol=0)
    untouched = [s for s in range(9) if s not in slots.tolist()]
    assert torch.equal(pool[untouched], before[untouched])


def test_decode_shifts_the_window():
    x, weight, bias, pool = problem(3, DIM)
    before = pool.clone()
    slots = torch.tensor([2, -1, 5], dtype=torch.int32)
    y = conv1d_ops.causal_conv1d_update_cpu(x, pool, weight, bias, "silu", conv_state_indices=slots)
    assert y.shape == x.shape
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert not y[i].any()
            continue
        want, window = oracles.conv1d_step(before[slot], x[i], weight, bias)
        assert oracles.relative(y[i], want) < 1e-6
        torch.testing.assert_close(pool[slot], window.float(), rtol=0, atol=0)
    untouched = [s for s in range(9) if s not in slots.tolist()]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("names", [["mixed", "star"], ["deep", "chain"], ["root"]])
def test_verify_follows_each_path_and_leaves_the_pool_alone(names: list[str]):
    trees = [TREES[name] for name in names]
    bs, n = len(trees), len(trees[0])
    flat, weight, bias, pool = problem(bs * n, DIM, seed=n)
    x = flat.view(bs, n, DIM).transpose(1, 2)  # the strided view GDNAttnBackend passes
    before = pool.clone()
    slots, rows = torch.tensor([6, 2][:bs]), torch.tensor([1, 0][:bs])
    windows = torch.full((3, n + 1, DIM, WIDTH - 1), float("nan"))
    first, after = (torch.tensor(column) for column in zip(*[oracles.links(t) for t in trees], strict=True))
    parents = torch.full((bs, n), 99)
    y = conv1d_ops.causal_conv1d_update_cpu(
        x,
        pool,
        weight,
        bias,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
        retrieve_next_token=first,
        retrieve_next_sibling=after,
        retrieve_parent_token=parents,
    )
    assert parents.tolist() == trees
    assert torch.equal(pool, before)
    y.transpose(1, 2).view(bs * n, -1)  # what GDNAttnBackend does with it
    for b, tree in enumerate(trees):
        for node in range(n):
            window = before[int(slots[b])]
            for t in oracles.path_to(node, tree):
                want, window = oracles.conv1d_step(window, x[b, :, t], weight, bias)
            assert oracles.relative(y[b, :, node], want) < 1e-6
            torch.testing.assert_close(windows[int(rows[b]), node], window.float(), rtol=0, atol=0)
    assert windows[:, n].isnan().all()


def test_verify_of_a_chain_into_overlapping_windows():
    """On a GPU SGLang stores a chain's windows as one sliding buffer; the op must write it in order."""
    n = 5
    flat, weight, bias, pool = problem(n, DIM)
    x = flat.view(1, n, DIM).transpose(1, 2)
    buffer = torch.zeros(1, DIM, n + WIDTH - 2)
    windows = buffer.as_strided((1, n, DIM, WIDTH - 1), (buffer.stride(0), 1, buffer.stride(1), 1))
    slots = torch.tensor([3])
    conv1d_ops.causal_conv1d_update_cpu(
        x, pool, weight, bias, "silu", conv_state_indices=slots, intermediate_conv_window=windows
    )
    inputs = torch.cat([pool[3], flat.T], dim=1)
    for node in range(n):
        assert torch.equal(windows[0, node], inputs[:, node + 1 : node + WIDTH])


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_parents_from_links(parents: list[int]):
    first, after = oracles.links(parents)
    assert parents_from_links(torch.tensor([first]), torch.tensor([after])).tolist() == [parents]


def test_a_link_past_the_tree_is_refused_and_one_backwards_ignored():
    """Stock's CPU verify in mode snapshot; PyTorch checks the index."""
    none = [-1, -1, -1]
    for links in (([3, -1, -1], none), ([1, -1, -1], [-1, 2**40, -1])):
        with pytest.raises(IndexError):
            parents_from_links(*(torch.tensor([link]) for link in links))
    backwards = ([1, 1, 0], [-9, 0, 2])
    assert parents_from_links(*(torch.tensor([link]) for link in backwards)).tolist() == [[-1, 0, -1]]
