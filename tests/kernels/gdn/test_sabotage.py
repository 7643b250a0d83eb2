"""Mutations: each wrong kernel or wrong bookkeeping below must fail the check that the right one passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from mamba_mtp_kernels.gdn.reference import gdn_verify_reference
from mamba_mtp_kernels.gdn.window import GdnWindow

from ..helpers import ancestors_of, rms_ratio
from .case import Case, make_case, with_books
from .checks import FLOAT32_LIMIT, check_verify


def _wrong_parent(case: Case) -> Case:
    parents = case.books.parents.clone()
    parents[:, 3] = torch.where(parents[:, 3] == 0, 1, 0)
    return with_books(case, ancestors=ancestors_of(parents))


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case], Case]:
    def apply(case: Case) -> Case:
        copy = case.clone()
        copy.tensors[name] = change(copy.tensors[name])
        return copy

    return apply


def _pending(change: int) -> Callable[[Case], Case]:
    def apply(case: Case) -> Case:
        pending = case.books.pending.clone()
        pending[case.books.slots.long()] += change
        return with_books(case, pending=pending)

    return apply


def _other_slots(case: Case) -> Case:
    return with_books(case, slots=case.books.slots.roll(1), rows=case.books.rows.roll(1))


def _stale_order(case: Case) -> Case:
    return with_books(case, order=case.books.order.roll(1, 1))


def _no_scale(case: Case) -> Case:
    return Case(case.books, case.tensors, 1.0)


INPUTS = {
    "wrong parent": _wrong_parent,
    "dropped decay of the nodes": _changed("a", lambda a: torch.full_like(a, -100.0)),
    "dropped decay of the window": _changed("window_g", torch.zeros_like),
    "dropped strength of the window": _changed("window_beta", torch.ones_like),
    "values of another head": _changed("window_v", lambda v: v.roll(1, 2)),
    "one pending token missing": _pending(-1),
    "one pending token too many": _pending(1),
    "rows permuted": _other_slots,
    "order shifted": _stale_order,
    "scale forgotten": _no_scale,
    "transposed state": _changed("checkpoint", lambda s: s.transpose(2, 3).contiguous()),
}


def _writes(case: Case, damage: Callable[[Case], None]) -> Callable[..., torch.Tensor]:
    """The reference, and then `damage` to the case whose tensors it is called with."""

    def verify(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        out = gdn_verify_reference(*args, **kwargs)
        damage(case)
        return out

    return verify


def _touch_other_slot(case: Case) -> None:
    case.tensors["checkpoint"][0].view(-1)[-1] = 0.0


def _unfold(case: Case) -> None:
    slot = case.folding_slots()[0]
    case.tensors["checkpoint"][slot] *= 1.001


def _touch_free_entry(case: Case) -> None:
    row = int(case.books.rows[0])
    case.tensors["window_k"][row, case.books.order[row, -1].long()] = 0.0


def _touch_pending_entry(case: Case) -> None:
    row = int(case.books.rows[0])
    case.tensors["window_beta"][row, case.books.order[row, 0].long()] += 1e-7


def _normalised_key(case: Case) -> None:
    rows, positions = case.node_positions()
    case.tensors["window_k"][rows, positions] /= case.tensors["window_k"][rows, positions].norm(dim=-1, keepdim=True)


def _change_pending(case: Case) -> None:
    case.books.pending[case.books.slots.long()] += 1


WRITES = {
    "another slot": _touch_other_slot,
    "folded state off by a thousandth": _unfold,
    "free window entry": _touch_free_entry,
    "pending window entry": _touch_pending_entry,
    "normalised key in the window": _normalised_key,
    "pending counted in verify": _change_pending,
}


def make() -> Case:
    return make_case(batch=3, nodes=5, tree=True, H=1, HV=2, pending=[3, 5, 8], seed=3)


@pytest.mark.parametrize("name", INPUTS)
def test_wrong_inputs_are_noticed(name: str) -> None:
    """What the reference makes of damaged arguments is far from what float64 makes of the right ones."""
    case = make()
    expected, _ = case.oracle()
    assert rms_ratio(case.clone().run(gdn_verify_reference), expected) <= FLOAT32_LIMIT
    assert rms_ratio(INPUTS[name](case).run(gdn_verify_reference), expected) > 1000 * FLOAT32_LIMIT


FOLDS = {
    "newest forgotten": torch.zeros_like,
    "folded one token too far": lambda newest: newest - 1,
    "folded one token too few": lambda newest: newest + 1,
}


@pytest.mark.parametrize("name", FOLDS)
def test_wrong_folds_are_noticed(name: str) -> None:
    """Outputs are the same whatever is folded: it is the state that must show it."""
    case = make_case(batch=3, nodes=5, tree=True, H=1, HV=2, pending=[3, 8, 9], newest=[2, 3, 1], seed=3)
    check_verify(case.clone(), gdn_verify_reference)

    def verify(*args: torch.Tensor, window: GdnWindow, **kwargs: object) -> torch.Tensor:
        return gdn_verify_reference(*args, window=replace(window, newest=FOLDS[name](window.newest)), **kwargs)

    with pytest.raises(AssertionError, match="folded state"):
        check_verify(case, verify)


@pytest.mark.parametrize("name", WRITES)
def test_wrong_writes_are_noticed(name: str) -> None:
    case = make()
    check_verify(case.clone(), gdn_verify_reference)
    with pytest.raises(AssertionError):
        check_verify(case, _writes(case, WRITES[name]))
