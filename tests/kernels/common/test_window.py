"""commit_window: pending counts and window orders after a verify step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.common import ops_for
from mamba_mtp_kernels.common.operands import Window
from mamba_mtp_kernels.common.reference import commit_window_reference
from mamba_mtp_kernels.common.window import commit_window

from ..helpers import (
    Bookkeeping,
    chain_parents,
    path_to,
    random_bookkeeping,
    random_newest,
    random_tree_parents,
)

COMMITS = [pytest.param(commit_window, id="kernel"), pytest.param(commit_window_reference, id="reference")]
KEEPS_NEWEST = pytest.mark.parametrize("keeps_newest", [False, True], ids=["takes all", "leaves the newest"])


def lengths_of(books: Bookkeeping) -> list[int]:
    """Some length of each batch row before the step, past what 16 bits hold."""
    return [70_000 + 1001 * b for b in range(books.batch)]


def naive_commit(books: Bookkeeping, last_correct: list[int], track: list[int]) -> tuple[Bookkeeping, list[int]]:
    """The design's sentence, in Python lists: what was folded leaves, the rest of the pending tokens and the accepted
    path stay."""
    books = books.clone()
    counts = []
    for b in range(books.batch):
        slot, row = int(books.slots[b]), int(books.rows[b])
        if slot <= 0:
            counts.append(0)
            continue
        p = int(books.pending[slot])
        kept = p - books.folding(b)
        tree = books.parents[b].tolist()
        old = books.order[row].tolist()
        path = path_to(tree, last_correct[b])
        new = old[p - kept : p] + [old[p + node] for node in path]
        pending = len(new)
        new += [position for position in old if position not in new]
        books.order[row] = torch.tensor(new, dtype=torch.int32)
        books.pending[slot] = pending
        books.window_row[slot] = row
        if books.newest is not None:
            books.newest[slot] = min(len(path) + lengths_of(books)[b] % books.page, pending)
            books.length[slot] = lengths_of(books)[b] + len(path)
        counts.append(kept + len(path_to(tree, track[b])) if track[b] >= 0 else 0)
    return books, counts


def run(commit, books: Bookkeeping, last_correct, track, device, index_dtype=torch.int32):
    on_device = books.clone().to(device)
    track_count = torch.full((books.batch + 1,), -5, dtype=torch.int32, device=device)
    given = {}
    if books.newest is not None:
        given["lengths"] = torch.tensor(lengths_of(books), dtype=index_dtype, device=device)
    commit(
        on_device.window(Window),
        on_device.batch_rows,
        window_row=on_device.window_row,
        last_correct=torch.tensor(last_correct, dtype=index_dtype, device=device),
        steps_to_track=None if track is None else torch.tensor(track, dtype=index_dtype, device=device),
        track_count=track_count,
        **given,
    )
    return on_device.to("cpu"), track_count.cpu().tolist()


def window_over(pending: torch.Tensor, fold_threshold: int) -> Window:
    """A window of which nobody asks for more than these."""
    return Window(pending, torch.zeros(1, 1, dtype=torch.int32, device=pending.device), fold_threshold)


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("threshold", [0, 5, 16])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 13, 32, 64])
@KEEPS_NEWEST
def test_matches_the_rule(commit, threshold, nodes, keeps_newest, device):
    generator = torch.Generator().manual_seed(nodes * 31 + threshold)
    batch = 6
    parents = random_tree_parents(batch, nodes, generator)
    parents[0] = chain_parents(1, nodes)[0]
    pending = torch.randint(0, threshold + nodes + 1, (batch,), generator=generator).tolist()
    pending[1], pending[2] = threshold + nodes, threshold
    newest = random_newest(pending, threshold, generator) if keeps_newest else None
    books = random_bookkeeping(
        parents=parents, pending=pending, fold_threshold=threshold, generator=generator, padding=(3,), newest=newest
    )
    last = torch.randint(0, nodes, (batch,), generator=generator).tolist()
    last[0], last[5] = nodes - 1, -1
    track = [
        path_to(parents[b].tolist(), last[b])[b % 2] if len(path_to(parents[b].tolist(), last[b])) > b % 2 else -1
        for b in range(batch)
    ]
    expected, counts = naive_commit(books, last, track)
    actual, track_count = run(commit, books, last, track, device)
    actual.assert_same(expected)
    assert track_count == [*counts, -5]


@pytest.mark.parametrize("commit", COMMITS)
def test_one_tree_of_all_rows(commit, device):
    generator = torch.Generator().manual_seed(12)
    tree = random_tree_parents(1, 7, generator).repeat(3, 1)
    books = random_bookkeeping(parents=tree, pending=[2, 7, 9], fold_threshold=5, generator=generator)
    expected, counts = naive_commit(books, [6, 2, -1], [0, 2, -1])
    actual, track_count = run(commit, replace(books, one_tree=True), [6, 2, -1], [0, 2, -1], device)
    replace(actual, one_tree=False).assert_same(expected)
    assert track_count == [*counts, -5]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("page", [4, 16])
def test_what_a_fold_leaves_goes_back_to_a_page(commit, page, device):
    """As far as anything is pending."""
    generator = torch.Generator().manual_seed(page)
    pending = [0, 3, 7, 16, 20, 24]
    books = replace(
        random_bookkeeping(
            parents=random_tree_parents(6, 5, generator),
            pending=pending,
            fold_threshold=20,
            generator=generator,
            newest=random_newest(pending, 20, generator),
        ),
        page=page,
    )
    last, nothing = [4, 0, -1, 2, 1, 4], [-1] * 6
    expected, _ = naive_commit(books, last, nothing)
    actual, _ = run(commit, books, last, None, device)
    actual.assert_same(expected)
    stays = [int(expected.newest[slot]) for slot in books.slots.tolist()]
    paths = [len(path_to(books.parents[b].tolist(), last[b])) for b in range(6)]
    assert sum(stay > path for stay, path in zip(stays, paths, strict=True)) > 2, "no page was begun"
    assert any(int(expected.pending[slot]) == stay > 0 for slot, stay in zip(books.slots.tolist(), stays, strict=True))


@pytest.mark.parametrize("commit", COMMITS)
@KEEPS_NEWEST
def test_no_tracking_and_int64(commit, keeps_newest, device):
    generator = torch.Generator().manual_seed(9)
    parents = random_tree_parents(4, 5, generator)
    books = random_bookkeeping(
        parents=parents,
        pending=[0, 3, 4, 8],
        fold_threshold=4,
        generator=generator,
        padding=(1, 2),
        index_dtype=torch.int64,
        newest=[0, 1, 2, 3] if keeps_newest else None,
    )
    expected, _ = naive_commit(books, [4, 2, 1, 3], [-1] * 4)
    actual, track_count = run(commit, books, [4, 2, 1, 3], None, device, torch.int64)
    actual.assert_same(expected)
    assert track_count == [0, 0, 0, 0, -5]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize(
    ("tree", "last", "path"),
    [
        ([-1, 0, 1, 2], 4, [0, 1, 2, 3]),
        ([-1, 0, 0, 1], 2**31 - 1, [0, 1, 3]),
        ([-1, 2, 1, 2], 3, [1, 2, 3]),
        ([-1, 1, 1, 1], 3, [1, 3]),
        ([-1, 9, 0, 1], 3, [1, 3]),
        ([-7, 0, 2**31 - 1, 0], 2, [2]),
        ([0, 0, 1, -9], 2, [0, 1, 2]),
    ],
    ids=["past the tree", "far past it", "circle", "own parent", "parent past the tree", "far past", "no root"],
)
def test_a_malformed_tree_ends_its_path(commit, tree, last, path, device):
    """The walk ends where parents do not fall, the order stays a permutation, the rows beside it are what they were."""
    generator = torch.Generator().manual_seed(8)
    parents = torch.tensor([[-1, 0, 1, 1]] * 3, dtype=torch.int32)
    books = random_bookkeeping(parents=parents, pending=[2, 2, 3], fold_threshold=4, generator=generator)
    books.parents[1] = torch.tensor(tree)
    actual, track_count = run(commit, books, [3, last, 2], [-1, last, -1], device)
    expected = books.clone()
    for b, nodes in enumerate(([0, 1, 3], path, [0, 1, 2])):
        slot, row = int(books.slots[b]), int(books.rows[b])
        old, before = books.order[row].tolist(), int(books.pending[slot])
        new = old[:before] + [old[before + node] for node in nodes]
        expected.order[row] = torch.tensor(new + [position for position in old if position not in new])
        expected.pending[slot], expected.window_row[slot] = len(new), row
    actual.assert_same(expected)
    assert track_count == [0, 2 + len(path), 0, -5]


@pytest.mark.parametrize("commit", COMMITS)
@KEEPS_NEWEST
def test_thousand_commits_keep_a_permutation(commit, keeps_newest, device):
    """And the newest tokens are still pending at the next commit, where they were."""
    generator = torch.Generator().manual_seed(4)
    steps = 1000 if commit is commit_window_reference or device.type == "cuda" else 20
    newest = [0, 2, 4] if keeps_newest else None
    books = random_bookkeeping(
        parents=chain_parents(3, 4), pending=[0, 2, 7], fold_threshold=6, generator=generator, newest=newest
    )
    folds = 0
    for _ in range(steps):
        books.parents = random_tree_parents(3, 4, generator)
        last = torch.randint(-1, 4, (3,), generator=generator).tolist()
        folds += sum(books.folding(b) > 0 for b in range(3))
        before, (books, _) = books, run(commit, books, last, None, device)
        assert (books.order.sort(1).values == torch.arange(books.capacity)).all()
        assert (books.pending[books.slots.long()] + 4 <= books.capacity).all()
        if keeps_newest:
            for b in range(3):
                slot, row = int(books.slots[b]), int(books.rows[b])
                assert int(books.newest[slot]) == len(path_to(books.parents[b].tolist(), last[b]))
                stays = int(before.newest[slot])
                old_end, end = int(before.pending[slot]), int(books.pending[slot] - books.newest[slot])
                kept = before.order[row, old_end - stays : old_end]
                assert torch.equal(books.order[row, end - stays : end], kept)
    assert folds > 0


@pytest.mark.parametrize(
    "mutate",
    [
        "parent", "accept+1", "accept-1", "stale pending", "track", "newest forgotten", "newest+1", "newest-1",
        "length",
    ],
)  # fmt: skip
def test_mutations_are_seen(mutate, device, monkeypatch):
    """Each of these wrong inputs must change the outcome, or the tests above prove nothing."""
    generator = torch.Generator().manual_seed(6)
    parents = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32)
    newest = [3] if mutate.startswith("newest") or mutate == "length" else None
    books = random_bookkeeping(
        parents=parents, pending=[2 if newest is None else 6], fold_threshold=4, generator=generator, newest=newest
    )
    last, track = [3], [1]
    expected, counts = naive_commit(books, last, track)
    actual, track_count = run(commit_window, books, last, track, device)
    actual.assert_same(expected)
    assert track_count[:1] == counts
    if mutate == "parent":
        books.parents[0, 3] = 2
    elif mutate == "accept+1":
        last = [4]
    elif mutate == "accept-1":
        last = [2]
    elif mutate == "stale pending":
        books.pending[books.slots[0]] = 3
    elif mutate == "newest forgotten":
        books.newest[:] = 0
    elif mutate.startswith("newest"):
        books.newest[books.slots[0]] += 1 if mutate == "newest+1" else -1
    elif mutate == "length":
        monkeypatch.setattr(f"{__name__}.lengths_of", lambda books: [0] * books.batch)
    else:
        track = [0]
    actual, track_count = run(commit_window, books, last, track, device)
    outcome = ("order", "pending") if newest is None else ("order", "pending", "length")
    same = all(torch.equal(getattr(actual, name), getattr(expected, name)) for name in outcome)
    assert not (same and track_count[:1] == counts)


@pytest.mark.parametrize("commit", COMMITS)
def test_lengths_are_asked_for(commit, device):
    generator = torch.Generator().manual_seed(0)
    books = random_bookkeeping(
        parents=chain_parents(2, 4), pending=[0, 0], fold_threshold=4, generator=generator, newest=[0, 0]
    ).to(device)
    count = torch.zeros(2, dtype=torch.int32, device=device)
    nothing = {"window_row": books.window_row, "last_correct": count, "steps_to_track": None, "track_count": count}
    with pytest.raises(ValueError, match="lengths: None, but the window keeps its slots' lengths"):
        commit(books.window(Window), books.batch_rows, **nothing)


def test_errors_name_the_argument(device):
    generator = torch.Generator().manual_seed(0)
    books = random_bookkeeping(parents=chain_parents(2, 4), pending=[0, 0], fold_threshold=4, generator=generator)
    with pytest.raises(ValueError, match=r"order: capacity 12, expected at least 5 \+ 2 \* 4"):
        books.fold_threshold = 5
        run(commit_window, books, [0, 0], None, device)
    books.fold_threshold = 4
    with pytest.raises(ValueError, match=r"last_correct: shape \(1,\), expected \[B=2\]"):
        run(commit_window, books, [0], None, device)
    with pytest.raises(ValueError, match="no argument says what the size N is"):
        rows = replace(books.to(device).batch_rows, parents=None)
        books = books.to(device)
        count = torch.zeros(2, dtype=torch.int32, device=device)
        commit_window(
            books.window(Window),
            rows,
            window_row=books.window_row,
            last_correct=count,
            steps_to_track=None,
            track_count=count,
        )


def test_ops_for():
    assert ops_for("cpu").commit_window is commit_window_reference
    assert ops_for("cuda").commit_window is commit_window
