"""build_tree: parents and ancestor masks from SGLang's links, in the kernel and in the reference; chain_tree: a
chain's."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common import ops_for
from mamba_mtp_kernels.common.chain import chain_tree
from mamba_mtp_kernels.common.operands import MAX_NODES
from mamba_mtp_kernels.common.reference import build_tree_reference
from mamba_mtp_kernels.common.tree import build_tree

from ..helpers import ancestors_of, chain_parents, random_tree_parents, tree_links

BUILDERS = [pytest.param(build_tree, id="kernel"), pytest.param(build_tree_reference, id="reference")]
POISON = 77


def run(builder, device, *, batch, nodes, links, rows=None):
    rows = rows or batch
    parents = torch.full((rows, nodes), POISON, dtype=torch.int32, device=device)
    ancestors = torch.full((rows, nodes), POISON, dtype=torch.int64, device=device)
    next_token, next_sibling = (link.to(device) for link in links)
    builder(parents, ancestors, retrieve_next_token=next_token, retrieve_next_sibling=next_sibling, batch=batch)
    return parents.cpu(), ancestors.cpu()


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 13, 16, 32, 64])
def test_chain_without_links(nodes, device):
    parents, ancestors = chain_tree(nodes, device)
    expected = chain_parents(1, nodes)
    assert (parents.dtype, ancestors.dtype) == (torch.int32, torch.int64)
    assert torch.equal(parents.cpu()[None], expected)
    assert torch.equal(ancestors.cpu()[None], ancestors_of(expected))
    for table, longer in zip((parents, ancestors), chain_tree(64, device), strict=True):
        assert torch.equal(table, longer[:nodes])


@pytest.mark.parametrize("builder", BUILDERS)
def test_rows_beyond_the_batch_stay_as_they_are(builder, device):
    links = tree_links(chain_parents(3, 5))
    parents, ancestors = run(builder, device, batch=2, nodes=5, links=links, rows=3)
    assert torch.equal(parents[:2], chain_parents(2, 5))
    assert (parents[2] == POISON).all() and (ancestors[2] == POISON).all(), "row beyond the batch written"


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nodes", [1, 2, 5, 8, 16, 32, 64])
def test_tree_from_links(builder, dtype, nodes, device):
    generator = torch.Generator().manual_seed(nodes)
    expected = random_tree_parents(3, nodes, generator)
    expected[0] = chain_parents(1, nodes)[0]
    links = [link.to(dtype) for link in tree_links(expected)]
    parents, ancestors = run(builder, device, batch=3, nodes=nodes, links=links)
    assert torch.equal(parents, expected)
    assert torch.equal(ancestors, ancestors_of(expected))


@pytest.mark.parametrize("builder", BUILDERS)
def test_row_stride(builder, device):
    generator = torch.Generator().manual_seed(1)
    expected = random_tree_parents(3, 6, generator)
    wide = [torch.full((4, 11), -9, dtype=torch.int64) for _ in range(2)]
    for buffer, link in zip(wide, tree_links(expected), strict=True):
        buffer[:3, :6] = link
    parents, _ = run(builder, device, batch=3, nodes=6, links=[buffer[:, :6] for buffer in wide])
    assert torch.equal(parents, expected)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("nodes", [1, 9, 64])
def test_garbage_links_give_some_tree(builder, nodes, device):
    """Stale rows must neither crash nor give anything but a topologically ordered tree."""
    generator = torch.Generator().manual_seed(2)
    links = [torch.randint(-5, nodes + 5, (12, nodes), generator=generator) for _ in range(2)]
    links[0][0], links[1][0] = 2**31 - 1, -(2**31)
    parents, ancestors = run(builder, device, batch=12, nodes=nodes, links=links)
    assert (parents[:, 0] == -1).all()
    assert (parents[:, 1:] >= 0).all() and (parents[:, 1:] < torch.arange(1, nodes)).all()
    assert torch.equal(ancestors, ancestors_of(parents))
    reference, _ = run(build_tree_reference, torch.device("cpu"), batch=12, nodes=nodes, links=links)
    assert torch.equal(parents, reference)


#: Links of five nodes (first children, next siblings) that no tree has.
MALFORMED = {
    "a node is its own child": ([0, 1, 2, 3, 4], [-1] * 5),
    "a node is its own sibling": ([1, -1, -1, -1, -1], [0, 1, 2, 3, 4]),
    "children in a circle": ([1, 2, 0, 4, 3], [-1] * 5),
    "siblings in a circle": ([1, -1, -1, -1, -1], [-1, 2, 3, 4, 1]),
    "a node with two parents": ([3, 3, 3, -1, 3], [-1, 2, 4, 4, -1]),
    "just past the tree": ([5, 5, 5, 5, 5], [5, 6, 7, 8, 9]),
    "far past it": ([2**31 - 1] * 5, [2**62] * 5),
    "negative": ([-2, -5, -(2**31), -6, -1], [-(2**62)] * 5),
    "in the tree once cut to 32 bits": ([2**32 + 1] * 5, [2**32 + 4] * 5),
}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("links", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_tree_stays_in_its_row(builder, links, device):
    """It becomes some tree, the trees beside it are what they were, and nothing around the tables is written."""
    good = torch.tensor([[-1, 0, 0, 1, 3]], dtype=torch.int32)
    rows = [
        torch.cat([link, torch.tensor([bad]), link]).to(device)
        for link, bad in zip(tree_links(good), links, strict=True)
    ]
    guarded = [torch.full((64 + 15 + 64,), POISON, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)]
    parents, ancestors = (table[64:79].view(3, 5) for table in guarded)
    builder(parents, ancestors, retrieve_next_token=rows[0], retrieve_next_sibling=rows[1], batch=3)
    for table in guarded:
        assert (table[:64] == POISON).all() and (table[79:] == POISON).all()
    parents, ancestors = parents.cpu(), ancestors.cpu()
    assert torch.equal(parents[[0, 2]], good.expand(2, 5))
    assert parents[1, 0] == -1 and (parents[1, 1:] >= 0).all() and (parents[1] < torch.arange(5)).all()
    assert torch.equal(ancestors, ancestors_of(parents))


def test_unlinked_nodes_hang_on_the_root(device):
    links = [torch.full((1, 4), -1) for _ in range(2)]
    links[0][0, 0] = 1
    parents, _ = run(build_tree, device, batch=1, nodes=4, links=links)
    assert parents.tolist() == [[-1, 0, 0, 0]]


def test_errors_name_the_argument(device):
    parents = torch.zeros(2, 4, dtype=torch.int32, device=device)
    ancestors = torch.zeros(2, 4, dtype=torch.int64, device=device)
    links = {"retrieve_next_token": parents, "retrieve_next_sibling": parents}
    with pytest.raises(ValueError, match=r"parents: shape \(2, 4\), expected \[batch>=3, N=\?\]"):
        build_tree(parents, ancestors, batch=3, **links)
    with pytest.raises(TypeError, match=r"parents: dtype torch\.int64"):
        build_tree(parents.long(), ancestors, batch=2, **links)
    with pytest.raises(ValueError, match=r"retrieve_next_sibling: shape \(1, 4\), expected \[batch>=2, N=4\]"):
        build_tree(parents, ancestors, batch=2, **links | {"retrieve_next_sibling": parents[:1]})
    with pytest.raises(ValueError, match="parents"):  # a row for all of them
        build_tree(parents[:1].expand(2, 4), ancestors, batch=2, **links)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("nodes", [65, 80])
def test_no_more_nodes_than_a_mask_has_bits(builder, nodes, device):
    """The reference too: a CPU engine would go on with masks that overflowed."""
    assert MAX_NODES == 64
    with pytest.raises(ValueError, match=f"parents: {nodes} nodes, the ancestor mask holds 64"):
        run(builder, device, batch=1, nodes=nodes, links=tree_links(chain_parents(1, nodes)))
    with pytest.raises(ValueError, match=f"parents: {nodes} nodes, the ancestor mask holds 64"):
        chain_tree(nodes, device)


def test_ops_for():
    assert ops_for("cpu").build_tree is build_tree_reference
    assert ops_for("cuda").build_tree is build_tree
    with pytest.raises(ValueError, match="xpu"):
        ops_for("xpu")
