"""One verify of the convolution: its inputs, its window, and what it has to give."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from mamba_mtp_kernels.common.operands import Rows
from mamba_mtp_kernels.conv1d.window import ConvWindow

from ..helpers import assert_same_bits, path_to, plan_alone, planned


class Case:
    """Inputs of one verify; everything that must not be read is NaN."""

    def __init__(
        self,
        parents,
        *,
        dim=10,
        width=4,
        dtype=torch.float32,
        state_dtype=None,
        bias=True,
        slots=None,
        pending=None,
        threshold=3,
        strides="pool",
        seed=0,
    ):
        """pending: tokens of each batch row, at most threshold + N; None: random."""
        generator = torch.Generator().manual_seed(seed)
        batch, nodes = parents.shape
        self.parents, self.width, self.threshold, self.newest = parents, width, threshold, None
        self.chain = False
        self.x = torch.randn(batch * nodes, dim + 6, generator=generator).to(dtype)[:, :dim]
        self.weight = torch.randn(dim, width, generator=generator).to(dtype)
        self.bias = torch.randn(dim, generator=generator).to(dtype) if bias else None
        slot_count, row_count, capacity = batch + 3, batch + 1, threshold + 2 * nodes
        states = torch.randn(slot_count, dim, width - 1, generator=generator).to(state_dtype or dtype)
        self.slots = torch.tensor(slots if slots is not None else [batch + 1 - b for b in range(batch)])
        self.rows = torch.randperm(row_count, generator=generator)[:batch]
        self.order = torch.stack([torch.randperm(capacity, generator=generator) for _ in range(row_count)]).int()
        if pending is None:
            pending = torch.randint(0, threshold + nodes + 1, (batch,), generator=generator).tolist()
        self.pending = torch.full((slot_count,), 10**6, dtype=torch.int32)
        # numbers that every dtype holds: as much of them as a state does, where that is what is read
        inputs = torch.randn(row_count, capacity, dim, generator=generator).bfloat16().to(dtype)
        read = torch.zeros(row_count, capacity, dtype=torch.bool)
        for b, count in enumerate(pending):
            if self.slots[b] > 0:
                self.pending[self.slots[b]] = count
                read[self.rows[b], self.order[self.rows[b], max(count - width + 1, 0) : count].long()] = True
                states[self.slots[b], :, : min(count, width - 1)] = float("nan")
        inputs[~read] = float("nan")
        self.inputs = inputs
        self.rows[self.slots <= 0] = 10**6
        unused = [s for s in range(slot_count) if s not in self.slots.tolist()]
        states[unused] = float("nan")
        self.states = states.transpose(1, 2).contiguous().transpose(1, 2) if strides == "transposed" else states

    def over(self, parents, nodes):
        """The same case with other trees, [B, N], whose nodes are these of ours."""
        changed = copy.copy(self)
        changed.parents, batch = parents, parents.shape[0]
        changed.x = self.x.reshape(batch, -1, self.x.shape[1])[:, nodes].reshape(batch * len(nodes), -1)
        return changed

    def batch_rows(self, device):
        return Rows(self.slots.to(device), self.rows.to(device), parents=self.parents.to(device), chain=self.chain)

    def window(self, device):
        """On copies of the window's tensors."""
        held = (None, None) if self.newest is None else (self.newest.clone().to(device), self.newest.clone().to(device))
        return ConvWindow(
            self.pending.clone().to(device),
            self.order.clone().to(device),
            self.threshold,
            self.inputs.clone().to(device),
            newest=held[0],
            length=held[1],
        )

    def run(self, op, device, *, activation="silu", **extra):
        """(y, the window's inputs after it). Whatever the plan says is asked of the plan alone."""
        states, window = self.states.clone().to(device), self.window(device)
        rows = planned(self.batch_rows(device), window, self.parents.shape[1])
        elsewhere = {name: torch.full_like(getattr(window, name), 10**6) for name in ("pending", "order")}
        y = op(
            self.x.to(device),
            conv_states=states,
            weight=self.weight.to(device),
            bias=None if self.bias is None else self.bias.to(device),
            activation=activation,
            rows=plan_alone(rows),
            window=replace(window, **elsewhere),
            **extra,
        )
        assert_same_bits("conv_states", states, self.states)
        return y.cpu(), window.inputs.cpu()

    def oracle(self, activation="silu"):
        """Node by node in float64: last K inputs of (state, pending tokens, path), dotted with the weight."""
        batch, nodes = self.parents.shape
        inputs = self.x.double().reshape(batch, nodes, -1)
        y = torch.zeros_like(inputs)
        for b in range(batch):
            slot = int(self.slots[b])
            if slot <= 0:
                continue
            waiting = self.inputs[self.rows[b], self.order[self.rows[b], : self.pending[slot]].long()].double()
            for node in range(nodes):
                path = path_to(self.parents[b].tolist(), node)
                history = torch.cat([self.states[slot].double(), waiting.T, inputs[b, path].T], dim=1)[:, -self.width :]
                acc = (history * self.weight.double()).sum(1)
                if self.bias is not None:
                    acc = acc + self.bias.double()
                y[b, node] = torch.nn.functional.silu(acc) if activation else acc
        return y.reshape(batch * nodes, -1)

    def expected_inputs(self):
        """Node i's inputs behind the pending ones."""
        batch, nodes = self.parents.shape
        expected = self.inputs.clone()
        for b in range(batch):
            if self.slots[b] > 0:
                p = int(self.pending[self.slots[b]])
                positions = self.order[self.rows[b], p : p + nodes].long()
                expected[self.rows[b], positions] = self.x.reshape(batch, nodes, -1)[b]
        return expected
