"""That tensors a process keeps are seen, and who keeps them."""

from __future__ import annotations

import pytest
import torch

from .memory import Memory, taken_by
from .states import State

pytestmark = pytest.mark.once


def test_what_is_kept_is_read_and_what_a_test_records_is_not():
    memory = Memory()
    memory.read()
    kept = torch.zeros(1000, dtype=torch.float64)
    memory.read()
    recorded = State(torch.zeros(5000), (torch.zeros(300),))
    views = [kept[:5], kept.view(10, 100)]
    memory.read()
    (first, taken), (second, _), (third, _) = memory.in_use
    assert (second - first, third - second, taken) == (8000, 0, 0)
    assert memory.holders() == []
    del recorded, views


def test_the_places_that_took_most_are_told():
    def block(state: str, size: int, *names: str) -> dict:
        frames = [{"filename": f"{name}.py", "line": 7, "name": name} for name in names]
        return {"state": state, "size": size, "frames": [{"filename": "??", "line": 0, "name": "at::empty"}, *frames]}

    blocks = [block("active_allocated", 512, "keeps", "calls")] * 3 + [block("inactive", 512, "gone")] * 9
    blocks += [block("active_allocated", 1024, "once"), {"state": "active_allocated", "size": 4096}]
    assert taken_by(blocks) == [
        "3 blocks, 1536 bytes: keeps.py:7 keeps < calls.py:7 calls",
        "1 blocks, 1024 bytes: once.py:7 once",
    ]
