"""The kernel that streams blocks of state, several a program as real batches have it: against the float64 recurrence,
and its states bit by bit against those of a block a program."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.mamba2 import verify_replay
from mamba_mtp_kernels.mamba2.verify_replay import Tiling

from ..helpers import assert_same_bits
from .case import WINDOWS, make_case
from .test_axis_order import mixed
from .test_verify_replay import AROUND_A_TILE, case_around_a_tile, check

STREAM = Tiling(16, 3, 1, 2)  # three blocks a program, the last of them beyond the head's rows


@pytest.fixture(params=["scores made before", "own scores"])
def own_scores(request, monkeypatch):
    monkeypatch.setattr(verify_replay, "makes_scores_once", lambda *_: request.param == "scores made before")


def small(nodes, **given):
    return make_case(nodes=nodes, batch=4, nheads=2, headdim=40, pending=[0, 5, 6, 9], padding=(0,), **given)


CASES = {
    "chain": lambda **given: small(4, **given),
    "tree of 8": lambda **given: small(8, tree=True, strided=True, **given),
    "states of 16 bits": lambda **given: small(3, dtype=torch.bfloat16, state_dtype=torch.bfloat16, dstate=40, **given),
    "a second tile": lambda **given: case_around_a_tile(
        *AROUND_A_TILE[0], nheads=2, ngroups=1, headdim=40, dstate=32, **given
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_its_blocks(case, own_scores, device):
    stream = CASES[case](device=device, seed=7)
    blocks = stream.clone()
    check(stream, tiling=STREAM)
    check(blocks, tiling=Tiling(16, 1, 1, 1))
    for name in ("checkpoint", *WINDOWS):
        assert_same_bits(name, stream.tensors[name], blocks.tensors[name])


def test_rows_in_another_order(own_scores, device):
    plain, ordered = small(4, device=device), small(4, device=device)
    schedule = torch.tensor([3, 2, 0, 1], dtype=torch.int32, device=device)
    y = ordered.run(verify_replay.mamba2_verify, tiling=STREAM, schedule=schedule)
    assert_same_bits("y", y, plain.run(verify_replay.mamba2_verify, tiling=STREAM))
    assert_same_bits("checkpoint", ordered.tensors["checkpoint"], plain.tensors["checkpoint"])


def test_slots_that_lie_as_kv(own_scores, device):
    plain = small(4, device=device)
    turned, order, slots = mixed(plain.clone(), (1, 3))
    y = turned.run(verify_replay.mamba2_verify, tiling=STREAM, axis_order=order)
    assert_same_bits("y", y, plain.run(verify_replay.mamba2_verify, tiling=STREAM, axis_order=torch.zeros_like(order)))
    for slot in slots:
        there = turned.tensors["checkpoint"][slot].reshape(-1, 16, 40).mT
        assert_same_bits("checkpoint", there, plain.tensors["checkpoint"][slot])
