"""The largest draft there is room for in an ancestor mask, and the refusal of a larger one."""

from __future__ import annotations

import pytest
from mamba_mtp_kernels.common.operands import MAX_NODES

from . import scenarios
from .harness import EngineError, check_equal, run
from .matrix import FAMILIES, IN_FULL, Case, in_modes
from .scenario import Scenario


def _spec(checkpoint, mode: str, nodes: int, family: str = "mamba2"):
    """A tree that fills its nodes: 11 levels of up to 8."""
    case = Case(family, "nextn-tree", "no_buffer", mode)
    return case.spec(checkpoint(family), topk=8, steps=11, draft_tokens=nodes)


def _few_turns(checkpoint) -> Scenario:
    return Scenario("few_turns", scenarios.turns(checkpoint.vocab).requests[:3])


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), in_modes(IN_FULL, FAMILIES))
def test_as_many_as_a_mask_has_bits(family, mode, checkpoint):
    todo = [_few_turns(checkpoint)]
    check_equal(run(_spec(checkpoint, mode, MAX_NODES, family), todo), todo)


@pytest.mark.parametrize("mode", IN_FULL)
def test_one_more_is_refused(mode, checkpoint):
    with pytest.raises(EngineError, match=r"--speculative-num-draft-tokens 65: .*at most 64 nodes"):
        run(_spec(checkpoint, mode, MAX_NODES + 1), [])


def test_snapshots_take_more(checkpoint):
    """SGLang's verify keeps no masks."""
    todo = [_few_turns(checkpoint)]
    check_equal(run(_spec(checkpoint, "snapshot", MAX_NODES + 1), todo), todo)
