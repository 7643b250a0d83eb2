"""What only slots mode has: a region of draft slots that SGLang must not see, and that is exactly as large as told."""

from __future__ import annotations

import json
import re

import pytest

from . import scenarios
from .harness import run
from .matrix import FAMILIES, Case


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_slots_are_all_there_is(family, checkpoint):
    """No per-draft copies of SGLang's; the bytes told are the region's, one state and window a request row and node
    but the root."""
    case = Case(family, "ngram-tree", "no_buffer", "slots")
    result = run(case.spec(checkpoint(family)), [scenarios.stops(checkpoint.vocab)])
    assert result.pool == "sglang_mamba_mtp.state.pools.DraftSlotPool"
    assert result.draft_state_bytes == 0
    told = json.loads(re.findall(r"mamba-mtp state: (\{.*\})", result.log)[-1])
    # SGLang accounts for a state and window a node and row; here the root needs none
    region = told["stock_bytes"] - told["slot_bytes"] * told["request_rows"]
    assert region <= told["parts"]["draft slots"] <= region + 1e5, told
    assert f"{case.spec('').max_mamba_cache_size} state slots" in result.log
