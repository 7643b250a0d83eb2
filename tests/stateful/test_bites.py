"""The state machine must notice each of these mistakes: a test that passes with the code broken proves nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("sglang")

from sglang_mamba_mtp.backends.target_verify import TargetVerify
from sglang_mamba_mtp.families.mamba2 import Mamba2Family
from sglang_mamba_mtp.state.axis_order import AxisOrders
from sglang_mamba_mtp.state.draft_slots import DraftSlots
from sglang_mamba_mtp.state.pools import MtpMambaPool, RewindPool
from sglang_mamba_mtp.state.store import DraftStore, VerifyBatch
from sglang_mamba_mtp.state.window import Window

from .test_lives import ReplayLives, RewindLives, SlotsLives

pytestmark = pytest.mark.once


class PagedLives(RewindLives):
    """Pages of five tokens in every life: what goes wrong with pages alone is met often enough."""

    pages = (5,)


def _nothing(original):
    return lambda self, *args, **kwargs: None


def _only_forget(original):
    return lambda self, slots: self.discard(slots)


def _commit_one_node_less(commit):
    def sabotaged(self: DraftStore, batch: VerifyBatch, *, last_correct: torch.Tensor, **kwargs) -> None:
        commit(self, batch, last_correct=torch.where(last_correct > 0, last_correct - 1, last_correct), **kwargs)

    return sabotaged


def _never_fold(prepare):
    def sabotaged(self: Window, *args) -> None:
        # The window is overwritten instead: what pends beyond the threshold is dropped.
        self.pending.clamp_(max=self.shape.threshold)
        prepare(self, *args)

    return sabotaged


def _nothing_stays(commit):
    def sabotaged(self: Window, batch: VerifyBatch, **kwargs) -> None:
        commit(self, batch, **kwargs)
        self.newest.zero_()

    return sabotaged


def _nothing_but_the_newest_stays(commit):
    def sabotaged(self: Window, *args, **kwargs) -> None:
        self._window = replace(self._window, page=1)
        commit(self, *args, **kwargs)

    return sabotaged


def _one_token_longer(state_at):
    def sabotaged(self: Window, src: torch.Tensor, dst: torch.Tensor, lengths: torch.Tensor) -> None:
        state_at(self, src, dst, lengths + 1)

    return sabotaged


def _without_the_convolution(fold_both):
    def sabotaged(self: Window, folds: object) -> None:
        self._fold(self._states, self._window, folds)

    return sabotaged


def _trees_as_chains(prepare):
    def sabotaged(self: DraftStore, batch: VerifyBatch, *_: object) -> None:
        each_its_first = torch.arange(1, batch.nodes + 1, device=self.states.device).repeat(batch.size, 1)
        prepare(self, batch, each_its_first, torch.full_like(each_its_first, -1))

    return sabotaged


def _one_place_short(place):
    def sabotaged(self: DraftSlots, batch: VerifyBatch) -> None:
        place(self, batch)
        written = self._per_node(self._write_slots, batch)
        last = self.first + (batch.rows + 1) * (self.nodes - 1) - 1
        written.copy_(torch.where(written == last[:, None], batch.slots[:, None], written))

    return sabotaged


def _after_it_was_written(launch):
    def sabotaged(self: DraftSlots, *args, **kwargs) -> torch.Tensor:
        launch(self, *args, **kwargs)
        return launch(self, *args, **kwargs)

    return sabotaged


def _decay_as_it_was(fold):
    def sabotaged(self: Mamba2Family, device: torch.device, model: torch.nn.Module) -> object:
        return fold(self, device, copy.deepcopy(model))

    return sabotaged


SABOTAGES = {
    "SGLang reads slots as replay left them": (ReplayLives, TargetVerify, "_claim_slots", _nothing),
    "SGLang reads slots as slots left them": (SlotsLives, TargetVerify, "_claim_slots", _nothing),
    "settle drops instead of folding": (ReplayLives, Window, "settle", _only_forget),
    "settle drops the draft slot": (SlotsLives, DraftSlots, "settle", _only_forget),
    "overwritten slots keep their pending count": (ReplayLives, MtpMambaPool, "overwritten_by_sglang", _nothing),
    "overwritten slots keep their draft slot": (SlotsLives, MtpMambaPool, "overwritten_by_sglang", _nothing),
    "replay commits the wrong node": (ReplayLives, Window, "commit", _commit_one_node_less),
    "slots commits the wrong node": (SlotsLives, DraftSlots, "commit", _commit_one_node_less),
    "two nodes share the root's slot": (SlotsLives, DraftSlots, "_place", _one_place_short),
    "a state is read after its root has written it": (SlotsLives, DraftSlots, "score", _after_it_was_written),
    "a window is read after its root has written it": (SlotsLives, DraftSlots, "convolve", _after_it_was_written),
    "pending tokens lost when the window is full": (ReplayLives, Window, "prepare", _never_fold),
    "replay ignores tree links": (ReplayLives, DraftStore, "prepare", _trees_as_chains),
    "slots ignores tree links": (SlotsLives, DraftStore, "prepare", _trees_as_chains),
    "a bit stays behind when its state moves": (ReplayLives, AxisOrders, "move", _nothing),
    "draft slots' bits stay behind": (SlotsLives, AxisOrders, "move", _nothing),
    "a bit is stale after an overwrite": (ReplayLives, AxisOrders, "mark", _nothing),
    "nobody turns a slot for SGLang": (SlotsLives, AxisOrders, "turn", _nothing),
    "a fold takes the newest step too": (RewindLives, Window, "commit", _nothing_stays),
    "a fold passes the boundary of a page": (PagedLives, Window, "commit", _nothing_but_the_newest_stays),
    "a slot is given away a token ahead of its key": (RewindLives, Window, "state_at", _one_token_longer),
    "a slot goes to the host as it lies": (RewindLives, MtpMambaPool, "leave_for_host", _nothing),
    "a slot goes to the host in the other order": (SlotsLives, MtpMambaPool, "leave_for_host", _nothing),
    "a slot that is loaded keeps its pending count": (ReplayLives, MtpMambaPool, "arrive_from_host", _nothing),
    "a slot that is loaded keeps its draft slot": (SlotsLives, MtpMambaPool, "arrive_from_host", _nothing),
    "slots are taken before they are brought back": (RewindLives, RewindPool, "catch_up", _nothing),
    "windows come back from sleep as they are": (ReplayLives, MtpMambaPool, "renew", _nothing),
    "draft slots come back from sleep as they are": (SlotsLives, MtpMambaPool, "renew", _nothing),
    "a fold decays by weights of before": (ReplayLives, Mamba2Family, "fold", _decay_as_it_was),
    "the convolution stays behind a fold": (RewindLives, Window, "_fold_both", _without_the_convolution),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, owner, attribute, make = SABOTAGES[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    quick = settings(
        max_examples=6000,  # what is found early ends early; what is drawn depends on the modules that are loaded
        derandomize=True,
        stateful_step_count=60,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
