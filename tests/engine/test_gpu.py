"""The engine tests on a GPU: CUDA graphs and overlap scheduling on, Triton attention, real kernels.

States are recorded at radix inserts and at the end only: reading them after every forward would synchronise the streams
and take the overlap away. One test does just that, for the states of running requests.
"""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import baseline, compare_states, run, token_differences
from .matrix import ALGORITHMS, FAMILY_MODES, Case
from .spec import EngineSpec

pytestmark = pytest.mark.gpu

# SGLang refuses Triton attention for Nemotron-H and FlashInfer has no float32, so Mamba2 engines cannot be compared
# token for token here: the demo on a GPU serves them in bfloat16 and examines every difference.
GPU_FAMILY_MODES = [(family, mode) for family, mode in FAMILY_MODES if family == "gdn"]

GPU_STATE_BOUND = 5e-3
"""float32 through tensor cores (tf32): the relative error of a state after a prefill in another chunking."""


def _spec(checkpoint, case: Case, **changes) -> EngineSpec:
    settings = {"device": "cuda", "record_live": False, "track_interval": 64, "timeout": 500.0, **changes}
    return case.spec(checkpoint(case.family), **settings)


def _check(result, todo, *, bound: float = GPU_STATE_BOUND) -> None:
    differences = token_differences(result, baseline(result.spec, todo))
    assert not differences, "\n".join(differences)
    assert result.accept_length > 1.05
    comparison = compare_states(result, bound)
    comparison.check()
    print(f"; {comparison.compared} states equal, worst {comparison.worst:.1e} ({comparison.worst_where})", end="")


@pytest.mark.parametrize("cache", ["no_buffer", "extra_buffer-overlap", "extra_buffer_lazy"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize(("family", "mode"), GPU_FAMILY_MODES)
def test_graphs_and_overlap(checkpoint, family, mode, algorithm, cache):
    todo = scenarios.common(checkpoint.vocab)
    _check(run(_spec(checkpoint, Case(family, algorithm, cache, mode)), todo), todo)


@pytest.mark.parametrize("algorithm", ["ngram-tree", "nextn-tree"])
@pytest.mark.parametrize(("family", "mode"), GPU_FAMILY_MODES)
def test_every_state(checkpoint, family, mode, algorithm):
    todo = scenarios.common(checkpoint.vocab)
    case = Case(family, algorithm, "extra_buffer-overlap", mode)
    _check(run(_spec(checkpoint, case, record_live=True), todo), todo)
