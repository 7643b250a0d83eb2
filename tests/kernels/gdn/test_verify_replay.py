"""gdn_verify against the float64 recurrence: Triton (interpreted without a GPU) and the PyTorch reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.gdn import config as gdn_config

from ..helpers import ancestors_of, assert_close, assert_same_bits, chain_parents, random_tree_parents
from .case import WINDOWS, Case, make_case, with_books
from .checks import FLOAT32_LIMIT, check_verify, implementation

BOTH = pytest.mark.parametrize("which", ["triton", "reference"])


@BOTH
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 11, 16])
def test_nodes(which: str, nodes: int, tree: bool, device: torch.device) -> None:
    case = make_case(batch=2, nodes=nodes, tree=tree, H=1, HV=2, fold_threshold=4, seed=nodes, device=device)
    check_verify(case, implementation(which, device)[0])


@BOTH
@pytest.mark.parametrize("nodes", [32, 64])
def test_many_nodes(which: str, nodes: int, device: torch.device) -> None:
    case = make_case(batch=1, nodes=nodes, tree=True, H=1, HV=1, pending=[3], device=device)
    check_verify(case, implementation(which, device)[0])


@BOTH
@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (1, 2), (2, 4), (1, 4)])
def test_head_groups(which: str, H: int, HV: int, device: torch.device) -> None:
    case = make_case(batch=2, nodes=3, H=H, HV=HV, pending=[2, 7], device=device)
    check_verify(case, implementation(which, device)[0])


@BOTH
@pytest.mark.parametrize(("K", "V"), [(16, 16), (8, 24), (40, 96), (96, 40), (33, 17), (128, 64)])
def test_head_sizes(which: str, K: int, V: int, device: torch.device) -> None:
    case = make_case(batch=2, nodes=3, H=1, HV=2, K=K, V=V, pending=[1, 8], device=device)
    check_verify(case, implementation(which, device)[0])


@BOTH
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(which: str, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(
        batch=3, nodes=4, tree=True, H=1, HV=2, dtype=dtype, state_dtype=state_dtype, pending=[0, 5, 9], device=device
    )
    check_verify(case, implementation(which, device)[0])


@pytest.mark.parametrize("K", [96, 128])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_16_bits_in_pieces(K: int, state_dtype: torch.dtype, device: torch.device) -> None:
    """More columns than one product has: queries and keys are loaded as such states are."""
    case = make_case(
        batch=3, nodes=4, tree=True, H=1, HV=2, K=K, dtype=torch.bfloat16, state_dtype=state_dtype, pending=[0, 5, 9],
        device=device,
    )  # fmt: skip
    check_verify(case, implementation("triton", device)[0])


@BOTH
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("fold_threshold", [0, 1, 6])
def test_every_pending_count(which: str, fold_threshold: int, index_dtype: torch.dtype, device: torch.device) -> None:
    """Rows that fold beside rows that do not, strided pools, padding rows in between."""
    nodes = 3
    pending = list(range(fold_threshold + nodes + 1))
    padding = (1, len(pending) + 1)
    case = make_case(
        batch=len(pending) + 2,
        nodes=nodes,
        tree=True,
        H=1,
        HV=1,
        fold_threshold=fold_threshold,
        pending=[pending[0], 0, *pending[1:], 0],
        padding=padding,
        index_dtype=index_dtype,
        strided=True,
        device=device,
    )
    check_verify(case, implementation(which, device)[0])


@BOTH
@pytest.mark.parametrize(
    ("nodes", "fold_threshold", "pending", "newest"),
    [
        (16, 20, [0, 15, 16, 17, 20, 25, 36, 36], [0, 0, 3, 0, 9, 9, 17, 4]),
        (8, 32, [24, 25, 32, 39, 40], [1, 0, 32, 30, 2]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paths_around_half_a_tile(
    which: str, nodes: int, fold_threshold: int, pending: list[int], newest: list[int], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Paths that fill half of the tile of the longest, and one token less and more, before and after a fold."""
    case = make_case(
        batch=len(pending) + 1, nodes=nodes, tree=True, H=1, HV=2, fold_threshold=fold_threshold,
        pending=[*pending, 0], newest=[*newest, 0], padding=(len(pending),), dtype=dtype, state_dtype=dtype,
        strided=True, device=device,
    )  # fmt: skip
    check_verify(case, implementation(which, device)[0])


@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups_of_other_sizes(group: int, device: torch.device) -> None:
    """However many tokens queries are carried over at once, and whether the last group is full or not."""
    from mamba_mtp_kernels.gdn.verify_replay import default_config

    verify = implementation("triton", device)[0]
    config = default_config(nodes=5, values=16, exact=True, fold_threshold=6, heads=14)
    case = make_case(batch=7, nodes=5, tree=True, H=1, HV=2, pending=[0, 1, 2, 3, 4, 6, 9], device=device)
    check_verify(case, verify, config=replace(config, group=group))


def every_newest(fold_threshold: int, nodes: int) -> tuple[list[int], list[int]]:
    """Pending and newest counts of all rows that a window of this threshold may hold."""
    pairs = [(p, n) for p in range(fold_threshold + nodes + 1) for n in range(min(p, fold_threshold) + 1)]
    return [p for p, _ in pairs], [n for _, n in pairs]


@BOTH
@pytest.mark.parametrize("fold_threshold", [0, 1, 4])
def test_every_newest_count(which: str, fold_threshold: int, device: torch.device) -> None:
    """Against float64, and against float64 that folds nothing: what has been folded is no matter to the outputs."""
    pending, newest = every_newest(fold_threshold, 2)
    case = make_case(
        batch=len(pending) + 1, nodes=2, tree=True, H=1, HV=1, fold_threshold=fold_threshold, pending=[*pending, 0],
        newest=[*newest, 0], padding=(len(pending),), strided=True, device=device,
    )  # fmt: skip
    lazy = with_books(case, fold_threshold=1000, newest=None, length=None)
    out = check_verify(case, implementation(which, device)[0])
    assert_close("o", out, lazy.oracle()[0], FLOAT32_LIMIT)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_new_is_a_window_that_does_not_ask(which: str, dtype: torch.dtype, device: torch.device) -> None:
    """newest of 0 everywhere: the bits of newest None."""
    case = make_case(batch=3, pending=[3, 7, 10], newest=[0, 0, 0], dtype=dtype, state_dtype=dtype, device=device)
    plain = with_books(case, newest=None, length=None)
    verify = implementation(which, device)[0]
    assert_same_bits("o", case.run(verify), plain.run(verify))
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, case.tensors[name], plain.tensors[name])


@BOTH
def test_only_padding_rows(which: str, device: torch.device) -> None:
    check_verify(make_case(batch=2, padding=(0, 1), device=device), implementation(which, device)[0])


@BOTH
def test_repeated_keys_full_strength(which: str, device: torch.device) -> None:
    """One key, beta next to 1, no decay: the case where inverting by powers cancels catastrophically."""
    case = make_case(
        batch=2, nodes=16, H=1, HV=2, fold_threshold=16, pending=[16, 20], same_keys=True, beta_logit=18.0,
        gate_shift=-14.0, device=device,
    )  # fmt: skip
    check_verify(case, implementation(which, device)[0])


@BOTH
@pytest.mark.parametrize("gate_shift", [10.0, 60.0, 1000.0])
def test_strong_decay(which: str, gate_shift: float, device: torch.device) -> None:
    """e^g underflows, alone or cumulated: results stay finite and right."""
    case = make_case(batch=2, nodes=4, tree=True, gate_shift=gate_shift, pending=[4, 8], device=device)
    check_verify(case, implementation(which, device)[0])


def chain_and_tree(device: torch.device) -> tuple[Case, Case]:
    """A chain of 5 nodes, and the same 5 nodes at the head of a tree of 8; the rest of the tree hangs off them."""
    tree = make_case(batch=3, nodes=8, H=1, HV=1, pending=[0, 5, 9], fold_threshold=6, device=device)
    parents = tree.books.parents.cpu()
    parents[:, 5:] = torch.tensor([[0, 5, 2], [3, 1, 1], [4, 4, 0]])
    tree = with_books(tree, parents=parents.to(device), ancestors=ancestors_of(parents).to(device))
    head = (torch.arange(3)[:, None] * 8 + torch.arange(5)).reshape(-1).to(device)
    chain = tree.clone()
    for name in ("q", "k", "v", "a", "b"):
        chain.tensors[name] = chain.tensors[name][head]
    parents = chain_parents(3, 5)
    return with_books(chain, parents=parents.to(device), ancestors=ancestors_of(parents).to(device)), tree


def test_chain_at_the_head_of_a_tree(device: torch.device) -> None:
    """Bit for bit: nodes off a path do not touch it. (PyTorch's exp depends on where in a tensor a value stands.)"""
    verify = implementation("triton", device)[0]
    chain, tree = chain_and_tree(device)
    ours, theirs = check_verify(chain, verify), check_verify(tree, verify)
    assert_same_bits("o of the chain", theirs.view(3, 8, *theirs.shape[1:])[:, :5], ours.view(3, 5, *ours.shape[1:]))


@BOTH
@pytest.mark.parametrize("products", [False, True], ids=["sums", "products"])
def test_one_tree_of_all_rows(which: str, products: bool, device: torch.device) -> None:
    sizes = {"dtype": torch.bfloat16, "K": 32} if products else {}
    case = make_case(batch=3, nodes=6, pending=[0, 3, 9], device=device, **sizes)
    tables = {"parents": case.books.parents, "ancestors": case.books.ancestors}
    alike = with_books(case, **{name: table[2:].repeat(3, 1) for name, table in tables.items()})
    shared, verify = with_books(alike, one_tree=True), implementation(which, device)[0]
    assert_same_bits("o", check_verify(shared, verify), check_verify(alike, verify))


@BOTH
def test_other_branches_do_not_matter(which: str, device: torch.device) -> None:
    """NaN inputs in one branch leave the outputs of the other nodes as they were, bit for bit."""
    verify = implementation(which, device)[0]
    _, tree = chain_and_tree(device)
    clean = tree.clone().run(verify).view(3, 8, -1)[:, :5]
    for name in ("q", "k", "v", "a", "b"):
        tree.tensors[name] = tree.tensors[name].clone()
        tree.tensors[name].view(3, 8, -1)[:, 5:] = math.nan if which == "reference" else 100.0
    assert_same_bits("o", tree.run(verify).view(3, 8, -1)[:, :5], clean)


@BOTH
@pytest.mark.parametrize("newest", [None, [3, 0, 6]], ids=["takes all", "leaves the newest"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_that_folds_equals_fold_then_verify(
    which: str, newest: list[int] | None, state_dtype: torch.dtype, device: torch.device
) -> None:
    """The fold inside a verify is the fold of gdn_fold of as many tokens, and its outputs start from the state as
    written; what it leaves pending is replayed as ever."""
    verify, fold = implementation(which, device)
    case = make_case(batch=3, H=1, HV=2, pending=[7, 10, 9], newest=newest, state_dtype=state_dtype, device=device)
    folded = with_books(case, newest=None, length=None)
    books, slots = folded.books, case.books.slots.long()
    counts = [pending - stays for pending, stays in zip((7, 10, 9), newest or (0, 0, 0), strict=True)]
    folded.fold(fold, replace(books.settling(), counts=torch.tensor(counts, device=device)))
    for b, count in enumerate(counts):
        row = int(books.rows[b])
        books.order[row] = books.order[row].roll(-count)
    books.pending[slots] -= torch.tensor(counts, dtype=torch.int32, device=device)
    ours, theirs = case.run(verify), folded.run(verify)
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, case.tensors[name], folded.tensors[name])
    assert_same_bits("o", ours, theirs)


@BOTH
@pytest.mark.parametrize("few", [1, 512], ids=["a head a program", "a block of values a program"])
def test_schedule_changes_no_bits(which: str, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start in another order and write where they would have."""
    monkeypatch.setattr(gdn_config, "FEW_HEADS", few)
    case = make_case(batch=4, nodes=3, pending=[2, 8, 9, 0], padding=(3,), H=1, HV=2, V=32, device=device)
    plain, ordered = case.clone(), case.clone()
    schedule = torch.tensor([2, 1, 3, 0, 77], dtype=torch.int32, device=device)
    verify = implementation(which, device)[0]
    assert_same_bits("o", ordered.run(verify, schedule=schedule), plain.run(verify))
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, ordered.tensors[name], plain.tensors[name])


def test_rejected_arguments(device: torch.device) -> None:
    """Each refusal names the argument and the value met."""
    verify, _ = implementation("triton", device)
    wrong = {
        "q": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "window_v": lambda x: x.half(),
        "window_k": lambda x: x.half(),
        "states": lambda x: x.transpose(2, 3),
        "A_log": lambda x: x[:1],
        "a": lambda x: x[:, :1],
    }
    for name, change in wrong.items():
        case = make_case(K=16, V=8, device=device)
        tensor = "checkpoint" if name == "states" else name
        case.tensors[tensor] = change(case.tensors[tensor])
        with pytest.raises((ValueError, TypeError), match=name):
            case.run(verify)
    case = make_case(device=device)
    with pytest.raises(ValueError, match="order: capacity"):
        with_books(case, fold_threshold=10_000).run(verify)


def test_random_trees_are_trees() -> None:
    parents = random_tree_parents(4, 9, torch.Generator().manual_seed(0))
    assert (parents[:, 0] == -1).all() and (parents[:, 1:] < torch.arange(1, 9)).all() and (parents[:, 1:] >= 0).all()
