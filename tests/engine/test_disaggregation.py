"""A prefill server and a decode server: states go from the one to the other, and what follows on them.

Both schedulers, their queues and pools, and the transfer (NIXL over TCP on this machine) are real (`pair`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import pytest

from sglang_mamba_mtp.compat import version

from . import scenarios
from .harness import check_equal, compare_states
from .matrix import FAMILIES, VARIANTS, Case
from .pair import run_pair
from .spec import EngineSpec, Result

CACHES = ("no_buffer", "extra_buffer", "extra_buffer-overlap")
"""Of the prefill server; a decode server has none. SGLang refuses lazy snapshots on either."""

FAST = {
    ("gdn", "replay", "nextn-chain", "extra_buffer-overlap"),
    ("mamba2", "replay", "nextn-tree", "no_buffer"),
}


FEW = {"max_running_requests": 2, "max_mamba_cache_size": 4}
"""Of the decode server, which takes slots in the order in which they were given up: each is to have several owners."""


def sides(case: Case, model: str, **changes) -> tuple[EngineSpec, EngineSpec]:
    """The prefill server's engine and the decode server's."""
    prefill = case.spec(model)
    return prefill, dataclasses.replace(prefill, radix="auto", **FEW, **changes)


def check_slots_had_several_owners(decode: Result) -> None:
    slots = [record.where for record in decode.records if record.kind == "arrived"]
    assert len(set(slots)) < len(slots), slots


def _cases() -> list:
    params = []
    for family, mode, algorithm, cache in itertools.product(
        FAMILIES, [name for name in VARIANTS if name != "off"], ("nextn-chain", "nextn-tree"), CACHES
    ):
        quick = (family, mode, algorithm, cache) in FAST
        case = Case(family, algorithm, cache, mode)
        params.append(pytest.param(case, id=case.name, marks=() if quick else (pytest.mark.slow,)))
    return params


@pytest.mark.in_turn
@pytest.mark.parametrize("case", _cases())
def test_a_pair_answers_as_one_server_does(case, checkpoint):
    todo = [scenarios.turns(checkpoint.vocab), scenarios.limits(checkpoint.vocab)]
    prefill, decode = run_pair(*sides(case, checkpoint(case.family)), todo)
    check_equal(decode, todo)
    compare_states(prefill).check()
    check_slots_had_several_owners(decode)
    kinds = {record.kind for record in decode.records}
    assert {"arrived", "decode"} <= kinds and "prefill" not in kinds, kinds


ON_A_GPU = [
    Case("gdn", "nextn-chain", "extra_buffer-overlap", "replay"),
    Case("gdn", "nextn-tree", "no_buffer", "slots"),
    Case("mamba2", "nextn-tree", "extra_buffer-overlap", "replay"),
    Case("mamba2", "nextn-chain", "no_buffer", "slots"),
]


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL, which moves the states")
@pytest.mark.parametrize("case", ON_A_GPU, ids=[case.name for case in ON_A_GPU])
def test_on_a_gpu(case, checkpoint):
    """CUDA graphs on both sides, and states that leave one process's GPU memory for the other's."""
    todo = [scenarios.turns(checkpoint.vocab), scenarios.limits(checkpoint.vocab)]
    here = {"device": "cuda", "record_live": False, "timeout": 400.0}
    prefill, decode = sides(case, checkpoint(case.family), **here)
    # To tune FlashInfer a prefill server of 0.5.23 decodes a verify's input, which Triton's attention does not take.
    untuned = prefill.extra | {"disable_flashinfer_autotune": True}
    found, answers = run_pair(dataclasses.replace(prefill, **here, extra=untuned), decode, todo)
    assert answers.graphs > 0
    check_equal(answers, todo)
    compare_states(found).check()
    check_slots_had_several_owners(answers)


@pytest.mark.parametrize(
    "family, mode",
    [
        pytest.param(
            *cell, id="-".join(cell), marks=pytest.mark.once if cell == ("gdn", "replay") else pytest.mark.slow
        )
        for cell in itertools.product(FAMILIES, ("replay", "slots", "replay-kv"))
    ],
)
def test_retracted_requests_come_back_whole(family, mode, checkpoint):
    """A decode server that takes a request back keeps its state on the host meanwhile."""
    todo = [scenarios.turns(checkpoint.vocab)]
    case = Case(family, "nextn-chain", "extra_buffer-overlap", mode)
    _, decode = run_pair(*sides(case, checkpoint(family), retract_every=7), todo)
    check_equal(decode, todo)
    assert sum(outcome.retractions for outcome in decode.outcomes.values()) > 0, "nothing was retracted"


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", ["replay", "slots"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_server_with_a_radix_cache(family, mode, cache, checkpoint, sglang_version):
    """It keeps states of its own then, of requests whose states arrived, and is sent the rest of a prompt."""
    if version.version_numbers() < (0, 5, 23):
        pytest.skip("SGLang declines it with NEXTN up to 0.5.22")
    todo = [scenarios.turns(checkpoint.vocab), scenarios.limits(checkpoint.vocab)]
    prefill = Case(family, "nextn-chain", cache, mode).spec(checkpoint(family))
    cached = prefill.extra | {"disaggregation_decode_enable_radix_cache": True}
    _, decode = run_pair(prefill, dataclasses.replace(prefill, extra=cached), todo)
    check_equal(decode, todo)
    assert {"arrived", "insert", "radix"} <= {record.kind for record in decode.records}


@pytest.mark.slow
def test_what_is_known_of_a_slots_last_owner_would_be_seen(checkpoint):
    todo = [scenarios.turns(checkpoint.vocab), scenarios.limits(checkpoint.vocab)]
    case = Case("gdn", "nextn-chain", "extra_buffer-overlap", "replay")
    _, decode = run_pair(*sides(case, checkpoint("gdn"), sabotage="skip_arriving"), todo)
    with pytest.raises(AssertionError, match="differ"):
        check_equal(decode, todo)
