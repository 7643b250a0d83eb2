"""The reference attention's tables and arithmetic against a float64 loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp import cpu

from . import oracles
from .test_gdn_ops import TREES
from .test_speculative_ops import ancestor_mask

pytestmark = pytest.mark.skipif(not cpu.needed(), reason="the CPU engine is installed where there is no CUDA driver")


@pytest.fixture(scope="module")
def attention():
    cpu.install()
    from sglang_mamba_mtp.cpu import attention

    return attention


def test_rows_are_padded_with_row_zero(attention):
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, real = attention.padded_rows(table, torch.tensor([2, 0]), torch.tensor([3, 1]))
    assert rows.tolist() == [[20, 21, 22], [0, 0, 0]]
    assert real.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("with_prefix", [False, True])
def test_tree_mask_of_either_layout(attention, with_prefix: bool):
    trees, lens, n = [TREES["mixed"], TREES["deep"]], torch.tensor([3, 6]), 5
    blocks = []
    for parents, length in zip(trees, lens.tolist(), strict=True):
        prefix = torch.ones(n, length if with_prefix else 0, dtype=torch.bool)
        blocks.append(torch.cat([prefix, ancestor_mask(parents)], dim=1).flatten())
    mask = attention.verify_tree_mask(torch.cat(blocks), lens, n)
    assert torch.equal(mask, torch.stack([ancestor_mask(parents) for parents in trees]))


def test_no_mask_means_a_chain_and_one_too_small_is_refused(attention):
    assert torch.equal(attention.verify_tree_mask(None, torch.tensor([4]), 5)[0], ancestor_mask(TREES["chain"]))
    with pytest.raises(ValueError, match="expected 2 x 5 x 5"):
        attention.verify_tree_mask(torch.ones(30, dtype=torch.bool), torch.tensor([4, 9]), 5)


def test_rows_that_data_parallel_attention_adds_are_chains(attention):
    trees = [TREES["mixed"], TREES["deep"]]
    mask = torch.cat([ancestor_mask(parents).flatten() for parents in trees])
    found = attention.verify_tree_mask(mask, torch.tensor([3, 6, 1]), 5)
    assert torch.equal(found, torch.stack([ancestor_mask(parents) for parents in (*trees, TREES["chain"])]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_attention(attention, dtype: torch.dtype):
    bs, n, heads, kv_heads, dim, length = 2, 3, 6, 2, 8, 7
    q = torch.randn(bs, n, heads, dim).to(dtype)
    k, v = torch.randn(2, bs, length, kv_heads, dim).to(dtype)
    mask = torch.rand(bs, n, length) > 0.4
    mask[..., 0] = True
    mask[1, :, 5:] = False  # padding: memory that nobody has written
    k[1, 5:], v[1, 5:] = float("nan"), float("nan")
    got = attention.padded_attention(q, k, v, mask, 0.3)
    assert got.dtype == dtype
    for b in range(bs):
        for i in range(n):
            for h in range(heads):
                keys, values = (x[b, mask[b, i], h // (heads // kv_heads)].double() for x in (k, v))
                want = ((keys @ q[b, i, h].double()) * 0.3).softmax(0) @ values
                assert oracles.relative(got[b, i, h], want) < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", ["DECODER", "ENCODER_ONLY"])
def test_a_block_is_seen_whole_where_the_layer_says_so(attention, kind: str):
    """The nodes of a DFLASH draft attend to each other, those of a chain to what is before them."""
    seen = attention.AttentionType[kind] is attention.AttentionType.ENCODER_ONLY
    nodes, prefix, dim = 3, torch.tensor([4, 2]), 8
    real = torch.arange(4) < prefix.unsqueeze(1)
    chain = torch.ones(nodes, nodes, dtype=torch.bool).tril()
    mask = torch.cat([real.unsqueeze(1).expand(2, nodes, -1), chain.expand(2, -1, -1)], dim=2)
    rows = torch.arange(14).view(2, 7)
    keys, values = torch.randn(2, 14, 1, dim)
    backend = object.__new__(attention.CpuAttnBackend)
    backend.table = rows, mask
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values)
    layer = SimpleNamespace(
        layer_id=0,
        attn_type=attention.AttentionType[kind],
        tp_q_head_num=1,
        qk_head_dim=dim,
        v_head_dim=dim,
        scaling=0.3,
    )
    q = torch.randn(2 * nodes, dim)
    got = backend._attend_table(q, layer).view(2, nodes, dim)
    for b in range(2):
        for i in range(nodes):
            last = nodes if seen else i + 1
            at = [*range(7 * b, 7 * b + int(prefix[b])), *range(7 * b + 4, 7 * b + 4 + last)]
            weights = (keys[at, 0].double() @ q[b * nodes + i].double() * 0.3).softmax(0)
            assert oracles.relative(got[b, i], weights @ values[at, 0].double()) < 1e-6
