"""tests/bench/counted.py without a GPU or a profiler: what it brings to a profiler, in the interpreter at toy sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import counted
import step
from cases import GdnShape, Mamba2Shape

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run it on"),
]

SHAPES = {"gdn": GdnShape(H=1, HV=2, K=32, V=64), "mamba2": Mamba2Shape(nheads=2, headdim=64, dstate=32, ngroups=1)}


@pytest.fixture
def profiler(monkeypatch):
    """[what a profiler hears], without plain decode, which test_bench_modes.py runs."""
    heard: list[str] = []
    monkeypatch.setattr(counted, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(counted, "SHAPES", SHAPES)
    monkeypatch.setattr(counted, "LAYERS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(step, "ACTIVATIONS", torch.float32)  # the interpreter cannot multiply bfloat16

    def no_sglang(*_, **__):
        raise ImportError

    monkeypatch.setattr(counted, "open_decode", no_sglang)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: heard.append(name))
    return heard


@pytest.mark.parametrize(
    ("case", "folding"),
    [
        (("gdn", 4, "chain", 4), {counted.NO_ROW: 0, counted.EVERY_ROW: 4, counted.MIX: 1}),
        (("mamba2", 32, "tree", 2), {counted.EVERY_ROW: 2}),
    ],
    ids=str,
)
def test_phases(case, folding, profiler, tmp_path):
    counted.profile_cases([counted.Case(*case)], tmp_path / "regions", 1e9)
    regions = [json.loads(line) for line in (tmp_path / "regions").read_text().splitlines()]
    ours = [region for region in regions if region["step"] == "ours"]
    assert {region["phase"]: region["folding"] for region in ours} == folding
    assert [region["part"] for region in ours] == ["head", "layer", "commit"] * len(folding)
    assert [region["step"] for region in regions[:2]] == ["read", "copy"]
    assert profiler == ["start", "stop"] * len(regions)


def test_times(profiler, monkeypatch):
    def once(launches, **_):
        for launch in launches:
            launch()
        return {"us": 16.0}

    monkeypatch.setattr(counted, "time_launches", once)
    monkeypatch.setattr(counted, "environment", dict)
    monkeypatch.setattr(counted, "sets_for", lambda *_, **__: 2)
    times = counted.time_cases([counted.Case("gdn", 4, "chain", 2)])
    (timed,), (floor,) = times["steps"], times["floors"]
    assert timed["us"] == 8 and timed["sets"] == 2 and times["empty_us"] == floor["read"] == floor["copy"] == 16
    assert floor["bytes"] == 2 * SHAPES["gdn"].state_bytes and "decode" not in floor
