"""The model of step times: what must hold whatever its constants are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_mamba_mtp.costs.step import MACHINES, Drafting, StepModel, machine_named, state_traffic
from sglang_mamba_mtp.costs.weights import model_size

from .test_weights import NEMOTRON_NANO_9B_V2

CHAIN, TREE = Drafting(4, True, 3), Drafting(8, False, 3)


def nemotron(machine: str = "H200") -> StepModel:
    size = model_size(SimpleNamespace(**NEMOTRON_NANO_9B_V2), attention_layers=4, linear_layers=27)
    state = 27 * (128 * 80 * 128 * 4 + 12288 * 3 * 2)
    return StepModel(size, 2.0, state, 4 * 8 * 128 * 2 * 2, 1, MACHINES[machine])


def test_traffic_is_the_one_of_the_architecture():
    assert state_traffic("off", CHAIN, 0) == 1 + 4 + 2 and state_traffic("off", TREE, 0) == 8 + 8 + 2
    assert state_traffic("slots", CHAIN, 0) == 1 + 4 and state_traffic("slots", TREE, 0) == 8 + 8
    assert state_traffic("replay", CHAIN, 0) == 2  # a fold at every verify
    assert state_traffic("replay", TREE, 8) == 1 + 1 / 2


def test_less_traffic_breaks_even_earlier():
    model = nemotron()
    for batch in (8, 64, 256):
        replay, slots, stock = (
            model.break_even(batch, 1024, CHAIN, state_traffic(mode, CHAIN, 8)) for mode in ("replay", "slots", "off")
        )
        assert replay < slots < stock


def test_more_nodes_need_more_tokens():
    model = nemotron()
    assert model.break_even(64, 0, TREE, 1.5) > model.break_even(64, 0, CHAIN, 1.5)


def test_arithmetic_bounds_large_batches():
    """Once operations decide, a verify of n nodes costs what n steps do."""
    assert nemotron("H20").break_even(4096, 0, Drafting(4, True, 0), 1.5) == pytest.approx(4, rel=0.2)


def test_ranks_divide_the_work():
    one = nemotron()
    two = StepModel(one.size, 2.0, one.state_bytes, one.kv_bytes, 2, one.machine)
    assert two.decode_seconds(64, 0) < one.decode_seconds(64, 0)


def test_machines_are_found_by_their_names():
    assert machine_named("NVIDIA H200").name == "H200" and machine_named("NVIDIA H20").name == "H20"
    assert machine_named("cpu").name == "CPU" and machine_named("something new").name == "H100"
