"""Draft-tree bookkeeping on CPU: links, masks, acceptance, cache locations, commit and snapshot copies."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_mamba_mtp.cpu import commit_ops, sampling_ops, speculative_ops

from . import oracles
from .test_gdn_ops import TREES

N = 5
Verify = Callable[[dict[str, Any], int], None]
SHAPES = [TREES[name] for name in ("chain", "star", "mixed", "deep")]


def ancestor_mask(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, oracles.path_to(node, parents)] = True
    return mask


def eagle_tables(parents: list[int], topk: int) -> tuple[list[int], list[int]]:
    """EAGLE's (parent_list, selected_index) for a tree whose nodes are in order of depth.

    Candidate numbers: the first step offers 0..topk-1, then every kept node offers topk more. `parent_list` holds, per
    group of topk candidates, which candidate the group extends; group 0 extends the root.
    """
    parent_list, selected, group_of, taken = [-1], [], {0: 0}, {}
    for node in range(1, len(parents)):
        parent = parents[node]
        if parent not in group_of:
            group_of[parent] = len(parent_list)
            parent_list.append(selected[parent - 1])
        group = group_of[parent]
        selected.append(group * topk + taken.get(group, 0))
        taken[group] = taken.get(group, 0) + 1
    return parent_list + [-1] * (len(parents) - len(parent_list)), selected


@pytest.mark.parametrize("mode", [0, 1])
def test_build_tree(mode: int):
    topk, lens = 4, [7, 0, 3, 11]
    tables = [eagle_tables(parents, topk) for parents in SHAPES]
    bs = len(SHAPES)
    size = sum(N * (n + N) for n in lens) if mode == 0 else bs * N * N
    mask = torch.ones(size, dtype=torch.bool)
    positions = torch.empty(bs * N, dtype=torch.long)
    index, child, sibling = torch.full((3, bs, N), -1)
    speculative_ops.build_tree_kernel_efficient_cpu(
        torch.tensor([t[0] for t in tables]),
        torch.tensor([t[1] for t in tables]),
        torch.tensor(lens),
        mask,
        positions,
        index,
        child,
        sibling,
        topk,
        N,
        N,
        mode,
    )
    assert index.flatten().tolist() == list(range(bs * N))
    at = 0
    for i, parents in enumerate(SHAPES):
        want_child, want_sibling = oracles.links(parents)
        assert child[i].tolist() == want_child
        assert sibling[i].tolist() == want_sibling
        depths = [len(oracles.path_to(node, parents)) - 1 for node in range(N)]
        assert positions[i * N : (i + 1) * N].tolist() == [lens[i] + d for d in depths]
        width = N if mode == 1 else lens[i] + N
        block = mask[at : at + N * width].view(N, width)
        assert torch.equal(block[:, width - N :], ancestor_mask(parents))
        assert block[:, : width - N].all()
        at += N * width


def test_reconstruct_from_mask_gives_the_same_links():
    bs, lens = len(SHAPES), torch.tensor([7, 0, 3, 11])
    mask = torch.stack([ancestor_mask(parents) for parents in SHAPES]).flatten()
    positions = torch.empty(bs * N, dtype=torch.long)
    index, child, sibling = torch.full((3, bs, N), -1)
    speculative_ops.reconstruct_indices_from_tree_mask(mask, lens, positions, index, child, sibling, bs, N)
    for i, parents in enumerate(SHAPES):
        assert (child[i].tolist(), sibling[i].tolist()) == oracles.links(parents)
        depths = [len(oracles.path_to(node, parents)) - 1 for node in range(N)]
        assert positions[i * N : (i + 1) * N].tolist() == [int(lens[i]) + d for d in depths]
    assert index.flatten().tolist() == list(range(bs * N))


def test_greedy_verification_follows_the_target():
    rng = random.Random(0)
    bs, depth, vocab = len(SHAPES), 4, 3
    child, sibling = (torch.tensor(c) for c in zip(*[oracles.links(p) for p in SHAPES], strict=True))
    index = torch.arange(bs * N).view(bs, N)
    for _ in range(50):
        drafts = torch.tensor([[rng.randrange(vocab) for _ in range(N)] for _ in range(bs)])
        target = torch.tensor([[rng.randrange(vocab) for _ in range(N)] for _ in range(bs)])
        predicts = torch.full((bs * N,), -7, dtype=torch.int32)
        accepted = torch.full((bs, depth), -1, dtype=torch.int32)
        count = torch.empty(bs, dtype=torch.int32)
        speculative_ops.verify_tree_greedy_cpu(predicts, accepted, count, drafts, index, child, sibling, target)
        for i, parents in enumerate(SHAPES):
            path = [0]
            while len(path) < depth:
                fitting = (j for j in range(N) if parents[j] == path[-1] and drafts[i, j] == target[i, path[-1]])
                following = next(fitting, None)
                if following is None:
                    break
                path.append(following)
            flat = [i * N + node for node in path]
            assert accepted[i].tolist() == flat + [-1] * (depth - len(path))
            assert int(count[i]) == len(path) - 1
            assert predicts[flat].tolist() == target[i, path].tolist()


@pytest.fixture
def alarm():
    """What does not end within ten seconds raises TimeoutError."""

    def ring(number, frame):
        raise TimeoutError("it goes round for ever")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _greedily(drafts: dict[str, Any], said: int) -> None:
    speculative_ops.verify_tree_greedy_cpu(**drafts, target_predict=torch.full((2, N), said))


def _by_drawing(drafts: dict[str, Any], said: int) -> None:
    sampling_ops.tree_speculative_sampling_target_only(
        **drafts,
        target_probs=torch.nn.functional.one_hot(torch.full((2, N), said), 10).float(),
        uniform_samples=torch.full((2, N), 0.5),
        uniform_samples_for_final_sampling=torch.full((2,), 0.5),
        threshold_single=1.0,
        threshold_acc=1.0,
    )


def _verify(how: Verify, child: list[int], sibling: list[int], drafts: list[int], said: int) -> list[int]:
    """Nodes accepted of one tree of N nodes after which the target says ``said`` everywhere; it stands beside a chain
    of the same drafts, which must be what it was."""
    chain = oracles.links(TREES["chain"])
    accepted, count = torch.full((2, N), -1, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    tree = {
        "predicts": torch.full((2 * N,), -7, dtype=torch.int32),
        "accept_index": accepted,
        "accept_token_num": count,
        "candidates": torch.tensor([drafts] * 2),
        "retrive_index": torch.arange(2 * N).view(2, N),
        "retrive_next_token": torch.tensor([child, chain[0]]),
        "retrive_next_sibling": torch.tensor([sibling, chain[1]]),
    }
    how(tree, said)
    matching = next((node for node in range(1, N) if drafts[node] != said), N)
    assert accepted[1].tolist() == [*range(N, N + matching), *[-1] * (N - matching)]
    return accepted[0, : int(count[0]) + 1].tolist()


WAYS = pytest.mark.parametrize("how", [_greedily, _by_drawing])


@WAYS
@pytest.mark.parametrize(
    ("child", "sibling", "drafts", "path"),
    [
        ([0, -1, -1, -1, -1], [-1] * 5, [8] * 5, [0]),
        ([1, 0, -1, -1, -1], [-1] * 5, [8] * 5, [0, 1]),
        ([1, 2, 1, -1, -1], [-1] * 5, [8] * 5, [0, 1, 2]),
        ([1, -1, -1, -1, -1], [-1, 1, -1, -1, -1], [0, 9, 8, 8, 8], [0]),
        ([1, -1, -1, -1, -1], [-1, 2, 3, 1, -1], [0, 9, 9, 9, 8], [0]),
        ([3, -1, -1, -1, -1], [-1, -1, -1, 2, -1], [0, 8, 8, 9, 8], [0]),
        ([-(2**62), -1, -1, -1, -1], [-9] * 5, [8] * 5, [0]),
    ],
    ids=[
        "own child",
        "parent's parent",
        "circle of children",
        "own sibling",
        "circle of siblings",
        "sibling backwards",
        "negative",
    ],
)
def test_a_link_that_leads_back_leads_nowhere(how, child, sibling, drafts, path, alarm):
    """Acceptance ends there, and the tree beside it is what it was."""
    assert _verify(how, child, sibling, drafts, 8) == path


@WAYS
@pytest.mark.parametrize(("child", "sibling"), [([5] * 5, [-1] * 5), ([1, -1, -1, -1, -1], [-1, 2**40, -1, -1, -1])])
def test_a_link_past_the_tree_is_refused(how, child, sibling):
    with pytest.raises(IndexError):
        _verify(how, child, sibling, [9] * 5, 8)


def test_cache_location_round_trip():
    table = torch.zeros(4, 20, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0, 3]), torch.tensor([4, 0, 7]), torch.tensor([6, 3, 7])
    locs = torch.tensor([11, 12, 13, 14, 15])
    speculative_ops.assign_req_to_token_pool_cpu(rows, table, start, end, locs, 20)
    assert table[2, 4:6].tolist() == [11, 12]
    assert table[0, :3].tolist() == [13, 14, 15]
    assert int((table != 0).sum()) == 5
    back = torch.zeros(8, dtype=torch.long)
    speculative_ops.assign_extend_cache_locs_cpu(rows, table, start, end, back, 20)
    assert back.tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    table[2, 6:12] = torch.arange(100, 106)
    table[0, 3:9] = torch.arange(200, 206)
    drafts = torch.zeros(12, dtype=torch.long)
    speculative_ops.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([2, 0]), table, torch.tensor([6, 3]), drafts, 20, topk=2, num_steps=3
    )
    assert drafts.tolist() == [*range(100, 106), *range(200, 206)]


def test_bonus_and_accepted_locations():
    bonus = torch.zeros(2, dtype=torch.long)
    speculative_ops.fill_bonus_tokens_cpu(torch.tensor([5, 6, 7, 8, 9, 0]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [7, 8]
    out = torch.zeros(4, dtype=torch.long)
    accept = torch.tensor([[0, 2, -1], [3, -1, -1]])
    speculative_ops.fill_accept_out_cache_loc_cpu(accept, torch.tensor([40, 41, 42, 43]), out)
    assert out.tolist() == [40, 42, 43, 0]


def test_kv_rows_move_with_overlap():
    buffers = [torch.arange(24.0).view(6, 4), torch.arange(36, dtype=torch.int64).view(6, 6)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers])
    target, source = torch.tensor([1, 2]), torch.tensor([2, 5])
    speculative_ops.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for now, then in zip(buffers, before, strict=True):
        assert torch.equal(now[target], then[source])
        assert torch.equal(now[[0, 3, 4, 5]], then[[0, 3, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_scatter_skips_negative_entries(dtype: torch.dtype):
    pool, nodes = torch.randn(2, 6, 3, 2).to(dtype), torch.randn(2, 4, 5, 3, 2)
    before = pool.clone()
    slots, steps = torch.tensor([4, 1, -1, 2]), torch.tensor([3, -1, 2, 0])
    commit_ops.scatter_states_with_mask(pool, nodes, slots, steps)
    assert torch.equal(pool[:, 4], nodes[:, 0, 3].to(dtype))
    assert torch.equal(pool[:, 2], nodes[:, 3, 0].to(dtype))
    assert torch.equal(pool[:, [0, 1, 3, 5]], before[:, [0, 1, 3, 5]])
    commit_ops.scatter_states_with_mask(pool, nodes, slots[:1], steps[:1], src_indices_raw=torch.tensor([2]))
    assert torch.equal(pool[:, 4], nodes[:, 2, 3].to(dtype))


def test_commit_nodes_and_interval_crossings():
    interval, n = 8, 4
    for before, length in itertools.product(range(5, 12), range(1, 5)):
        path = [0, 2, 3, 1][:length]
        accept = torch.tensor([path + [-1] * (4 - length)])
        last, track = commit_ops.commit_track_indices(
            accept, torch.tensor([length]), torch.tensor([before]), n, interval
        )
        assert last.tolist() == [path[-1]]
        crossed = [i for i in range(length) if (before + i + 1) % interval == 0]
        assert track is not None
        assert track.tolist() == [path[crossed[-1]] if crossed else -1]
    assert commit_ops.commit_track_indices(torch.tensor([[4, 6]]), torch.tensor([2]), None, 4, 8)[1] is None


def test_snapshots_copy_masked_rows_only():
    conv, ssm = torch.randn(2, 6, 3), torch.randn(2, 6, 4)
    keep = conv.clone(), ssm.clone()
    args = (torch.tensor([1, 2, -1]), torch.tensor([True, False, True]), torch.tensor([5, 4, 3]), 3)
    commit_ops.track_states_all_layers(conv, ssm, *args)
    for now, then in zip((conv, ssm), keep, strict=True):
        assert torch.equal(now[:, 5], then[:, 1])
        assert torch.equal(now[:, :5], then[:, :5])
    one = ssm[0].clone()
    commit_ops.track_states_if_needed(conv[0], ssm[0], *args)
    assert torch.equal(ssm[0], one)
