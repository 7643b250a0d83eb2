"""A process of a server is killed outright while requests decode: what its clients are told, and what is left of it.

The servers listen at one port, one after the other: each is also the one started again after the death before.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mtp_demo import client
from mtp_demo.server import free_port

from .deaths import DEVICE, PROBLEMS, Death, Fault, die

FAULTS = {
    "scheduler": Fault(1, "sglang::scheduler"),
    "rank-1": Fault(2, "sglang::scheduler_TP1"),
    "rank-0": Fault(2, "sglang::scheduler_TP0"),
    "detokenizer": Fault(1, "sglang::detokenizer"),
}
IN_CI = ("scheduler", "rank-1")
"""The others are slow."""

DIAGNOSES = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""What SGLang does before it ends. It waits for that, 65 seconds where a scheduler still lives."""


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def earlier() -> list[Death]:
    """Those who died at this port before."""
    return []


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.in_turn("death") if name in IN_CI else pytest.mark.slow) for name in FAULTS
    ],
)
def death(request, port, earlier, tmp_path_factory) -> Death:
    """One server's, for all tests."""
    fault = FAULTS[request.param]
    if DEVICE == "cuda" and len(list(Path("/dev").glob("nvidia[0-9]*"))) < fault.ranks:
        pytest.skip(f"{fault.ranks} ranks and fewer GPUs")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SGLANG_MAMBA_MTP")]:
            patch.delenv(name)
        for name in DIAGNOSES:
            patch.setenv(name, "0")
        died = die(fault, port, tmp_path_factory.mktemp(request.param) / "log")
    earlier.append(died)
    return died


def test_it_answers_right_though_others_died_at_its_port(death, earlier):
    assert "mamba-mtp" in death.log and all(answer.verify_steps > 0 for answer in death.answers)
    assert client.accuracy(death.answers, PROBLEMS) == 1
    assert [answer.finish for answer in death.answers] == ["stop"] * len(PROBLEMS)
    for other in earlier:
        assert [answer.text for answer in other.answers] == [answer.text for answer in death.answers]


@pytest.mark.parametrize("name", ["whole", "streamed", "openai", "waiting", "late"])
def test_no_client_takes_a_part_for_the_whole(death, name):
    """Its connection breaks; nothing has told it that the answer is there."""
    asked = death.clients[name]
    assert name not in death.hung
    assert asked.error is not None and not asked.complete, asked.told


def test_what_clients_had_been_told_is_right(death):
    """Up to the end of the answer, after which the model was made to go on."""
    for name, answer in zip(("streamed", "openai"), death.answers[1:], strict=True):
        told = death.clients[name].told
        assert told and (told.startswith(answer.text) or answer.text.startswith(told)), name
    assert [death.clients[name].told for name in ("whole", "waiting", "late")] == [""] * 3


def test_the_server_ends_and_says_why(death):
    """By itself, with a status that is no success. Of two ranks the one that lives may be the first to say it."""
    assert death.status not in (None, 0)
    assert "It usually means one child failed" in death.log
    assert "crashed with exit code -9" in death.log or "Scheduler hit an exception" in death.log


def test_no_process_is_left(death):
    assert death.left == []
