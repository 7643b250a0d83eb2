"""The state machine must notice each of these mistakes: a test that passes with the code broken proves nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("sglang")

from sglang_mamba_mtp.pool import MtpMambaPool
from sglang_mamba_mtp.window import Window

from .test_replay_window import ReplayLives


def _skip_settle(self: Window, slots: torch.Tensor) -> None:
    self.discard(slots)


def _keep_pending_of_overwritten_slots(self: MtpMambaPool, slots: torch.Tensor) -> None:
    pass


def _commit_one_node_less(commit):
    def sabotaged(self: Window, **kwargs) -> None:
        last = kwargs["last_correct"]
        commit(self, **{**kwargs, "last_correct": torch.where(last > 0, last - 1, last)})

    return sabotaged


def _never_fold(build_tree):
    def sabotaged(self: Window, *args) -> None:
        # The window is overwritten instead: what pends beyond the threshold is dropped.
        self.pending.clamp_(max=self.layout.threshold)
        build_tree(self, *args)

    return sabotaged


def _trees_as_chains(build_tree):
    def sabotaged(self: Window, batch: int, nodes: int, next_token: object, next_sibling: object) -> None:
        build_tree(self, batch, nodes, None, None)

    return sabotaged


SABOTAGES = {
    "settle drops instead of folding": (Window, "settle", lambda original: _skip_settle),
    "overwritten slots keep their pending count": (MtpMambaPool, "discard", lambda o:
    _keep_pending_of_overwritten_slots), "commit takes the wrong node": (Window, "commit", _commit_one_node_less),
    "pending tokens lost when the window is full": (Window, "build_tree", _never_fold), "tree links ignored": (Window,
    "build_tree", _trees_as_chains),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, make = SABOTAGES[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    quick = settings(
        max_examples=300,
        derandomize=True,
        stateful_step_count=30,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ReplayLives, settings=quick)
