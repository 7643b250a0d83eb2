"""What only replay mode has: the window, from folding at every step to hardly ever."""

from __future__ import annotations

import json
import re

import pytest

from . import scenarios
from .harness import check_equal, run
from .matrix import MODES, Case

FAMILIES = [family for family in MODES if "replay" in MODES[family]]


@pytest.mark.in_turn
@pytest.mark.parametrize("window", [0, *(pytest.param(n, marks=pytest.mark.once) for n in (1, 5)), 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_window(family, window, checkpoint):
    """Any window gives the same tokens and states; the verify tree has 8 nodes, so 0 to 5 fold nearly always."""
    vocab = checkpoint.vocab
    todo = [scenarios.turns(vocab), scenarios.limits(vocab), scenarios.aborts(vocab)]
    case = Case(family, "ngram-tree", "no_buffer" if window % 2 else "extra_buffer-overlap", "replay")
    check_equal(run(case.spec(checkpoint(family), env={"SGLANG_MAMBA_MTP_WINDOW": str(window)}), todo), todo)


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_no_state_copies(family, checkpoint):
    """The pool holds slots and windows; SGLang's per-draft copies of the state are not allocated."""
    case = Case(family, "ngram-tree", "no_buffer", "replay")
    result = run(case.spec(checkpoint(family)), [scenarios.stops(checkpoint.vocab)])
    assert result.pool == "sglang_mamba_mtp.state.pools.ReplayPool"
    assert result.draft_state_bytes == 0
    # From what was really allocated: nothing beside the slots but the windows, at the size the log tells.
    told = json.loads(re.findall(r"mamba-mtp state: (\{.*\})", result.log)[-1])
    beside = result.pool_bytes - result.slot_bytes
    assert told["speculative_bytes"] <= beside <= told["speculative_bytes"] + 1024, (beside, told)
    stock = run(Case(family, "ngram-tree", "no_buffer", "snapshot").spec(checkpoint(family)), [])
    assert stock.draft_state_bytes > 0
    assert stock.pool_bytes - stock.slot_bytes >= stock.draft_state_bytes
    assert stock.slot_bytes == result.slot_bytes
