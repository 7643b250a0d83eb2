"""What a verify draws on a CPU: the target's probabilities, whatever the drafts."""

from __future__ import annotations

import collections

import pytest
import torch

from sglang_mamba_mtp.cpu import sampling_ops

# A root with two drafts, of which the first has one too; the second draft of the root is the likeliest token.
CHILD, SIBLING, DRAFTS = [1, 3, -1, -1], [-1, 2, -1, -1], [0, 4, 1, 2]
PROBABILITIES = [[0.1, 0.5, 0.15, 0.05, 0.2], [0.3, 0.1, 0.4, 0.1, 0.1], [0.2] * 5, [0.0, 0.0, 0.7, 0.3, 0.0]]


def draw(count: int, single: float = 1.0, acc: float = 1.0) -> list[list[tuple[int, int]]]:
    """``count`` draws of that tree with coins of their own: the nodes of each path and what was said after them."""
    generator = torch.Generator().manual_seed(1)
    predicts, accepted = torch.zeros(4 * count, dtype=torch.int32), torch.full((count, 3), -1, dtype=torch.int32)
    lengths = torch.empty(count, dtype=torch.int32)
    sampling_ops.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=lengths,
        candidates=torch.tensor(DRAFTS).expand(count, 4),
        retrive_index=torch.arange(4 * count).view(count, 4),
        retrive_next_token=torch.tensor(CHILD).expand(count, 4),
        retrive_next_sibling=torch.tensor(SIBLING).expand(count, 4),
        uniform_samples=torch.rand(count, 4, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(count, generator=generator),
        target_probs=torch.tensor(PROBABILITIES).expand(count, 4, 5),
        draft_probs=torch.zeros(count, 4, 5),
        threshold_single=single,
        threshold_acc=acc,
        deterministic=True,
    )
    paths = []
    for row, path in enumerate(accepted.tolist()):
        nodes = [node - 4 * row for node in path if node >= 0]
        assert len(nodes) == int(lengths[row]) + 1 and nodes[0] == 0
        said = [int(predicts[4 * row + node]) for node in nodes]
        assert said[:-1] == [DRAFTS[node] for node in nodes[1:]], "an accepted draft is not what was said"
        paths.append(list(zip(nodes, said, strict=True)))
    return paths


@pytest.mark.once
def test_tokens_are_drawn_by_the_targets_probabilities():
    """Whatever the drafts: the first token as after the root, the second as after the first."""
    said: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for path in draw(30_000):
        for node, token in path:
            said[node][token] += 1
    for node, counts in said.items():
        total = sum(counts.values())
        shares = torch.tensor([counts[token] / total for token in range(5)])
        wanted = torch.tensor(PROBABILITIES[node])
        bound = 5 * (wanted * (1 - wanted) / total).sqrt() + 1e-9
        assert bool(((shares - wanted).abs() <= bound).all()), (node, shares, wanted)
    assert sorted(said) == [0, 1, 2, 3], "a path that was never taken"


@pytest.mark.once
def test_thresholds_accept_what_the_target_would_not():
    """The root's drafts have 0.2 and 0.5: half of the latter is enough, or whichever coin reaches twice their sum."""
    assert all(path[0][1] in (DRAFTS[1], DRAFTS[2]) for path in draw(200, single=0.5))
    assert any(path[0][1] not in (DRAFTS[1], DRAFTS[2]) for path in draw(200, acc=0.9))
    assert all(path[0][1] in (DRAFTS[1], DRAFTS[2]) for path in draw(200, acc=0.7))


@pytest.mark.once
def test_the_likeliest_tokens_add_up_to_one():
    """Of each row as many as it asks for, or as many as have so much together; ties of the last one stay."""
    rows = torch.tensor([[0.1, 0.5, 0.15, 0.05, 0.2], [0.3, 0.1, 0.4, 0.1, 0.1], [0.2] * 5])
    top_k = sampling_ops.top_k_renorm_prob(rows, torch.tensor([2, 1, 1]))
    wanted = torch.tensor([[0, 0.5, 0, 0, 0.2], [0, 0, 0.4, 0, 0], [0.2] * 5])
    torch.testing.assert_close(top_k, wanted / wanted.sum(-1, keepdim=True))
    top_p = sampling_ops.top_p_renorm_prob(rows, torch.tensor([0.8, 0.4, 1.0]))
    wanted = torch.tensor([[0, 0.5, 0.15, 0, 0.2], [0, 0, 0.4, 0, 0], [0.2] * 5])
    torch.testing.assert_close(top_p, wanted / wanted.sum(-1, keepdim=True))
