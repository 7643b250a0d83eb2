"""Once an engine is ready, no request waits for a kernel of ours to be compiled."""

from __future__ import annotations

import pytest

from . import adaptive, scenarios
from .harness import run
from .matrix import ENGINE, FAMILIES, Case, in_modes

CAPTURED = ("_build_tree_kernel", "_place_nodes_kernel")
"""What captured graphs launch, beside the verifies: the engine on a CPU has none, and the first of them is compiled for
every power of two that a batch fits in."""

CACHES = {
    "replay": "extra_buffer-overlap",
    "slots": "no_buffer",
    "replay-kv": "no_buffer",
    "slots-kv": "extra_buffer_lazy",
}


def _todo(vocab: int) -> list:
    """Requests that start, track, are donated, copied, aborted, in batches of one and more."""
    return [scenarios.turns(vocab), scenarios.shared(vocab), scenarios.chunked(vocab), scenarios.aborts(vocab)]


def _late(result) -> list[str]:
    return [name for name in result.compiled_late if not name.startswith(CAPTURED)]


@pytest.mark.in_turn
@pytest.mark.parametrize(("family", "mode"), in_modes(CACHES, FAMILIES))
def test_nothing_is_compiled_while_serving(family, mode, checkpoint):
    case = Case(family, "nextn-tree", CACHES[mode], mode)
    result = run(case.spec(checkpoint(family), count_compiled=True), _todo(checkpoint.vocab))
    assert len(result.compiled) > 3 and _late(result) == []


@pytest.mark.in_turn
@pytest.mark.parametrize("family", FAMILIES)
def test_nor_when_the_draft_length_changes(family, checkpoint, tmp_path):
    case = Case(family, "nextn-chain", "extra_buffer-overlap", "replay")
    extra = {**ENGINE[family].get("extra", {}), **adaptive.settings(tmp_path)}
    result = run(case.spec(checkpoint(family), count_compiled=True, extra=extra), _todo(checkpoint.vocab))
    assert len(set(adaptive.node_counts(result))) >= 3
    assert len(result.compiled) > 3 and _late(result) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_compiled_while_serving_on_a_gpu(family, mode, checkpoint):
    """With real graphs nothing is left out."""
    case = Case(family, "nextn-tree", CACHES[mode], mode)
    spec = case.spec(checkpoint(family), count_compiled=True, device="cuda", record_live=False, timeout=400.0)
    result = run(spec, _todo(checkpoint.vocab))
    assert result.graphs > 0 and len(result.compiled) > 3
    assert result.compiled_late == []
