"""commit_conv: the windows at the accepted and tracked nodes, all layers at once. Copies, so compared bit for bit."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.operands import Rows
from mamba_mtp_kernels.conv1d.commit import commit_conv
from mamba_mtp_kernels.conv1d.reference import commit_conv_reference

from ..helpers import assert_same_bits, chain_parents, path_to, random_tree_parents

COMMITS = [pytest.param(commit_conv, id="kernel"), pytest.param(commit_conv_reference, id="reference")]


class Case:
    def __init__(self, parents, *, width=4, layers=2, dim=6, dtype=torch.float32, state_dtype=None, padding=(), seed=0):
        generator = torch.Generator().manual_seed(seed)
        batch, nodes = parents.shape
        self.parents, self.taps = parents, width - 1
        self.states = torch.randn(layers, 2 * batch + 3, dim, width - 1, generator=generator).to(state_dtype or dtype)
        self.inputs = torch.randn(layers, batch + 2, nodes, dim, generator=generator).to(dtype)
        order = 1 + torch.randperm(2 * batch + 2, generator=generator)
        self.slots, self.track_slots = order[:batch].clone(), order[batch : 2 * batch].clone()
        self.rows = torch.randperm(batch + 2, generator=generator)[:batch]
        for turn, b in enumerate(padding):
            self.slots[b], self.rows[b] = -(turn % 2), -(10**6)
        self.last = torch.randint(0, nodes, (batch,), generator=generator)
        self.track = torch.full((batch,), -1)

    def run(self, op, device, *, tracking=True, index_dtype=torch.int64):
        states, inputs = self.states.clone().to(device), self.inputs.clone().to(device)
        op(
            states,
            inputs,
            Rows(
                self.slots.to(device, index_dtype), self.rows.to(device, index_dtype), parents=self.parents.to(device)
            ),
            last_correct=self.last.to(device, index_dtype),
            steps_to_track=self.track.to(device, index_dtype) if tracking else None,
            track_slots=self.track_slots.to(device, index_dtype) if tracking else None,
        )
        assert_same_bits("conv_inputs", inputs, self.inputs)
        return states.cpu()

    def expected(self):
        states = self.states.clone()
        for b, slot in enumerate(self.slots.tolist()):
            if slot <= 0:
                continue
            for target, node in ((slot, int(self.last[b])), (int(self.track_slots[b]), int(self.track[b]))):
                if target <= 0 or node < 0:
                    continue
                path = path_to(self.parents[b].tolist(), node)
                taken = self.inputs[:, self.rows[b], path].transpose(1, 2).to(states.dtype)
                states[:, target] = torch.cat([self.states[:, slot], taken], dim=2)[:, :, -self.taps :]
        return states


@pytest.mark.parametrize("op", COMMITS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 32])
def test_matches_the_rule(op, width, nodes, device):
    parents = random_tree_parents(4, nodes, torch.Generator().manual_seed(nodes + width))
    parents[0] = chain_parents(1, nodes)[0]
    case = Case(parents, width=width, padding=(2,), seed=nodes)
    case.last[0], case.last[3] = nodes - 1, -1
    for b in range(2):
        path = path_to(parents[b].tolist(), int(case.last[b]))
        case.track[b] = path[len(path) // 2]
    case.track_slots[1] = -1
    case.track[2] = 0
    assert_same_bits("conv_states", case.run(op, device), case.expected())


@pytest.mark.parametrize("op", COMMITS)
def test_without_tracking(op, device):
    case = Case(random_tree_parents(3, 5, torch.Generator().manual_seed(1)), padding=(0, 1))
    states = case.run(op, device, tracking=False, index_dtype=torch.int32)
    assert_same_bits("conv_states", states, case.expected())


@pytest.mark.parametrize("op", COMMITS)
def test_transposed_pool_and_other_dtype(op, device):
    case = Case(
        random_tree_parents(2, 5, torch.Generator().manual_seed(2)), dtype=torch.bfloat16, state_dtype=torch.float32
    )
    expected = case.expected()
    case.states = case.states.transpose(2, 3).contiguous().transpose(2, 3)
    assert_same_bits("conv_states", case.run(op, device).contiguous(), expected)


@pytest.mark.parametrize("op", COMMITS)
def test_rejected_nodes_do_not_matter(op, device):
    case = Case(chain_parents(2, 6), seed=3)
    case.last[:] = 2
    expected = case.expected()
    case.inputs[:, :, 3:] = float("nan")
    assert_same_bits("conv_states", case.run(op, device), expected)


@pytest.mark.parametrize("mutate", ["parent", "accept+1", "accept-1", "row", "track"])
def test_mutations_are_seen(mutate, device):
    case = Case(torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32), seed=4)
    case.last[0], case.track[0] = 3, 1
    expected = case.expected()
    if mutate == "parent":
        case.parents[0, 3] = 2
    elif mutate == "accept+1":
        case.last[0] = 4
    elif mutate == "accept-1":
        case.last[0] = 2
    elif mutate == "row":
        case.rows[0] = (case.rows[0] + 1) % 3
    else:
        case.track[0] = 0
    assert not torch.equal(case.run(commit_conv, device), expected)


def test_errors_name_the_argument(device):
    case = Case(chain_parents(2, 3))
    case.inputs = case.inputs[:1]
    with pytest.raises(ValueError, match="conv_inputs: shape"):
        case.run(commit_conv, device)
