"""A convolution and a verify that start while the kernel before them runs have the bits of kernels that wait."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from mamba_mtp_kernels.conv1d.verify_replay import conv1d_verify
from mamba_mtp_kernels.conv1d.window import ConvWindow
from mamba_mtp_kernels.gdn import verify_replay
from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

from ..helpers import assert_same_bits, planned
from .case import WINDOWS, Case, make_case
from .test_gpu import QWEN3_NEXT

LAYERS = 12
WRITTEN = ("checkpoint", *WINDOWS)


class Layer:
    """One layer's convolution and verify, over a window of its own."""

    def __init__(self, case: Case, chain: bool, seed: int) -> None:
        """case: what all layers start from; seed: of what is this layer's own."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        books, self.case, self.chain = case.books, case.clone(), chain
        self.widths = [QWEN3_NEXT[h] * QWEN3_NEXT[d] for h, d in (("H", "K"), ("H", "K"), ("HV", "V"))]
        dim, width = sum(self.widths), 4

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.x, self.weight = randn(books.batch * books.nodes, dim), randn(dim, width)
        self.states, self.inputs = randn(len(books.pending), dim, width - 1), randn(*books.order.shape, dim)

    def run(self, after_convolution: bool) -> torch.Tensor:
        books, tensors = self.case.books, self.case.tensors
        x = self.x * 1.0  # gone when the verify asks for memory, as a model's is
        window = books.window(ConvWindow, inputs=self.inputs)
        y = conv1d_verify(
            x,
            conv_states=self.states,
            weight=self.weight,
            bias=None,
            activation="silu",
            rows=planned(replace(books.batch_rows, chain=self.chain), window, books.nodes),
            window=window,
            parts=[self.widths[0], tensors["window_k"], tensors["window_v"]],
        )
        del x
        tensors["q"] = y.unflatten(-1, (QWEN3_NEXT["H"], -1))
        if after_convolution:
            return self.case.verify(partial(gdn_verify, after_convolution=True))
        torch.cuda.synchronize()
        with mock.patch.object(verify_replay, "has_dependent_launch", return_value=False):
            return self.case.verify(gdn_verify)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize("batch", [1, 6, 48])
def test_layers_in_a_graph_have_the_bits_of_kernels_that_wait(batch: int, nodes: int, tree: bool) -> None:
    """Layer after layer in one graph, padding among the rows, against one kernel at a time."""
    pending = [(5 * row) % (17 + nodes) for row in range(batch)]
    case = make_case(
        batch=batch, nodes=nodes, tree=tree, fold_threshold=16, pending=pending, padding=(2,) if batch > 2 else (),
        dtype=torch.bfloat16, strided=True, device="cuda", **QWEN3_NEXT,
    )  # fmt: skip
    early, late = ([Layer(case, not tree, seed) for seed in range(LAYERS)] for _ in range(2))
    expected = [layer.run(False) for layer in late]
    saved = [{name: layer.case.tensors[name].clone() for name in WRITTEN} for layer in early]
    for layer in early:
        layer.run(True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [layer.run(True) for layer in early]
    for _ in range(5):
        for layer, tensors in zip(early, saved, strict=True):
            for name, tensor in tensors.items():
                layer.case.tensors[name].copy_(tensor)
        graph.replay()
        for layer, waited, output, o in zip(early, late, outputs, expected, strict=True):
            assert_same_bits("o", output, o)
            for name in WRITTEN:
                assert_same_bits(name, layer.case.tensors[name], waited.case.tensors[name])
