"""What graphs take, against servers that told it (tests/bench/results/2026-11-22-h200-graphs.txt)."""

from __future__ import annotations

import pytest

from sglang_mamba_mtp.costs.beside import graph_bytes
from sglang_mamba_mtp.costs.step import Drafting

QWEN3_NEXT, NEMOTRON = 151936, 131072
CHAIN, TREE = Drafting(4, True, 3), Drafting(8, False, 3)


@pytest.mark.parametrize(
    ("requests", "drafting", "topk", "vocabulary", "ranks", "measured"),
    [
        (236, CHAIN, 1, QWEN3_NEXT, 2, 3.60 + 1.91 + 2.68),
        (168, TREE, 4, QWEN3_NEXT, 2, 5.06 + 5.73 + 3.77),
        (142, TREE, 4, NEMOTRON, 1, 2.22 + 2.67 + 1.51),
    ],
)
def test_graphs_of_servers_that_were_measured(requests, drafting, topk, vocabulary, ranks, measured):
    assert graph_bytes(requests, drafting, topk, vocabulary, ranks) == pytest.approx(measured * 2**30, rel=0.03)


def test_who_drafts_without_a_model_has_fewer_graphs():
    ngram, block, chain = Drafting(8, False, 0), Drafting(8, True, 1), Drafting(8, True, 7)
    sizes = [graph_bytes(64, drafting, 1, NEMOTRON, 1) for drafting in (ngram, block, chain)]
    assert sizes == sorted(set(sizes))
    assert graph_bytes(128, chain, 1, NEMOTRON, 1) == 2 * sizes[2]
