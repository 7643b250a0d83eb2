"""Whole steps whose kernels start while the one before them runs have the bits of kernels that wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from mamba_mtp_kernels.common import plan, window
from mamba_mtp_kernels.common.operands import Rows, plan_width
from mamba_mtp_kernels.conv1d import fold, verify_replay
from mamba_mtp_kernels.conv1d.window import ConvWindow
from mamba_mtp_kernels.gdn import verify_replay as gdn

from ..helpers import assert_same_bits
from .case import WINDOWS, make_case
from .test_gpu import QWEN3_NEXT

LAYERS, STEPS, WIDTH = 3, 5, 4
EARLY = (plan, window, fold, verify_replay, gdn)


class Stack:
    """Some layers over one bookkeeping, and everything that a step launches."""

    def __init__(self, batch: int, nodes: int, tree: bool, device: torch.device, **shape: int) -> None:
        generator = torch.Generator(device=device).manual_seed(batch)
        pending = [(12 + 5 * row) % (17 + nodes) for row in range(batch)]
        case = make_case(
            batch=batch, nodes=nodes, tree=tree, fold_threshold=16, pending=pending,
            newest=[min(count, nodes // 2) for count in pending], padding=(2,) if batch > 2 else (),
            dtype=torch.bfloat16, device=device, **shape,
        )  # fmt: skip
        self.books, self.chain = case.books, not tree
        self.layers = [case.clone() for _ in range(LAYERS)]
        self.widths = [shape[h] * shape[d] for h, d in (("H", "K"), ("H", "K"), ("HV", "V"))]
        dim = sum(self.widths)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).bfloat16()

        self.x, self.weight = randn(LAYERS, batch * nodes, dim), randn(LAYERS, dim, WIDTH)
        self.states = randn(LAYERS, len(self.books.pending), dim, WIDTH - 1)
        self.inputs = randn(LAYERS, *self.books.order.shape, dim)
        whole = {"dtype": torch.int32, "device": device}
        made = {"plan": torch.zeros(batch, plan_width(nodes, 16), **whole), "schedule": torch.zeros(batch, **whole)}
        self.rows: Rows = replace(self.books.batch_rows, chain=self.chain, **made)
        self.last = [torch.randint(0, nodes, (batch,), generator=generator, **whole) for _ in range(STEPS)]
        self.lengths, self.count = torch.zeros(batch, **whole), torch.zeros(batch, **whole)

    def kept(self) -> dict[str, torch.Tensor]:
        """What steps leave behind."""
        found = {name: x for name, x in vars(self.books).items() if isinstance(x, torch.Tensor)}
        found |= {"conv states": self.states, "conv inputs": self.inputs, "plan": self.rows.plan}
        for number, layer in enumerate(self.layers):
            found |= {f"{name} of layer {number}": layer.tensors[name] for name in ("checkpoint", *WINDOWS)}
        return found

    def run(self) -> list[torch.Tensor]:
        """Some steps, of which the rows accept what `last` says; their outputs."""
        outputs = []
        for last in self.last:
            every = self.books.window(ConvWindow, inputs=self.inputs)
            plan.plan_rows(every, self.rows, nodes=self.books.nodes)
            outputs += [self.layer(number, every) for number in range(LAYERS)]
            window.commit_window(
                every, self.rows, window_row=self.books.window_row, last_correct=last, steps_to_track=None,
                track_count=self.count, lengths=self.lengths,
            )  # fmt: skip
            fold.commit_conv(self.states, every, self.rows, after_commit=True)
        return outputs

    def layer(self, number: int, every: ConvWindow) -> torch.Tensor:
        case, tensors = self.layers[number], self.layers[number].tensors
        parts = [self.widths[0], tensors["window_k"], tensors["window_v"]]
        y = verify_replay.conv1d_verify(
            self.x[number], conv_states=self.states[number], weight=self.weight[number], bias=None, activation="silu",
            rows=self.rows, window=every.layer(number), parts=parts,
        )  # fmt: skip
        tensors["q"] = y.unflatten(-1, (case.tensors["window_k"].shape[-2], -1))
        case.books = self.books

        def verify(*inputs: torch.Tensor, rows: Rows, **named: object) -> torch.Tensor:
            return gdn.gdn_verify(
                *inputs, rows=replace(rows, schedule=self.rows.schedule), **named, after_convolution=True
            )

        return case.verify(verify)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """No kernel starts before the one before it has ended."""
    with ExitStack() as stack:
        for module in EARLY:
            stack.enter_context(mock.patch.object(module, "has_dependent_launch", return_value=False))
        yield


def steps_have_the_bits_of_kernels_that_wait(
    batch: int, nodes: int, tree: bool, device: torch.device, **shape: int
) -> None:
    early, late = (Stack(batch, nodes, tree, device, **shape) for _ in range(2))
    with one_at_a_time():
        expected = late.run()
    saved = {name: tensor.clone() for name, tensor in early.kept().items()}
    early.run()  # compiles, or is all there is
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = early.run()
    for _ in range(5 if device.type == "cuda" else 1):
        for name, tensor in early.kept().items():
            tensor.copy_(saved[name])
        if device.type == "cuda":
            graph.replay()
        else:
            outputs = early.run()
        for output, o in zip(outputs, expected, strict=True):
            assert_same_bits("o", output, o)
        for name, tensor in early.kept().items():
            assert_same_bits(name, tensor, late.kept()[name])


def test_the_steps_of_this_test_commit_and_fold(device: torch.device) -> None:
    """(Where no kernel can start early the bits are the same for nothing.)"""
    stack = Stack(3, 4, True, device, H=1, HV=2, K=16, V=16)
    before = {name: tensor.clone() for name, tensor in stack.kept().items()}
    stack.run()
    after = stack.kept().items()
    changed = {name for name, tensor in after if not torch.equal(tensor.nan_to_num(77), before[name].nan_to_num(77))}
    assert {"pending", "order", "newest", "length", "conv states", "conv inputs", "plan"} <= changed
    assert {f"checkpoint of layer {number}" for number in range(LAYERS)} <= changed


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("batch", [1, 40])
def test_steps_in_a_graph_have_the_bits_of_kernels_that_wait(
    batch: int, nodes: int, tree: bool, device: torch.device
) -> None:
    steps_have_the_bits_of_kernels_that_wait(batch, nodes, tree, device, **QWEN3_NEXT)
