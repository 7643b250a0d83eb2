"""The engine tests on a GPU: real kernels, CUDA graphs and overlap scheduling (`gpu_engines`).

In float32 tokens equal the plain engine's and states agree to 1e-5, as on a CPU; in bfloat16 they differ by no more
than rounding does without speculation (`rounding`). What else an engine may be asked for is in test_gpu_features.py.
"""

from __future__ import annotations

import importlib.util

import pytest

from . import adaptive, rounding
from .gpu_engines import (
    DEFAULT_MODES,
    VERSION,
    Cell,
    Engines,
    captured_of,
    cells,
    check_engine,
    check_equal,
    parameter,
    stock_of,
)
from .harness import STATE_BOUND, compare_states, token_differences
from .matrix import ALGORITHMS, FAMILIES, FAMILY_MODES, IN_FULL, MODES, Case, caches
from .spec import Result
from .states import relative_error

pytestmark = pytest.mark.gpu

QUICK = {
    ("ngram-chain", "extra_buffer-overlap"),
    ("ngram-tree", "no_buffer"),
    ("ngram-tree", "extra_buffer_lazy"),
    ("nextn-chain", "extra_buffer-overlap"),
    ("nextn-tree", "no_buffer"),
    ("nextn-tree", "extra_buffer-overlap"),
    ("nextn-tree", "extra_buffer_lazy"),
    ("nextn-tree", "rewind"),
    ("ngram-tree", "rewind"),
}
"""Of the default mode; the rest of its cells is slow."""

QUICK_IN_FULL_MODES = {("ngram-tree", "no_buffer"), ("nextn-tree", "extra_buffer-overlap")}

QUICK_IN_EVERY_MODE = {("nextn-tree", "extra_buffer-overlap")}


def _quick(family: str, mode: str) -> set[tuple[str, str]]:
    if mode == MODES[family][0]:
        return QUICK
    return QUICK_IN_FULL_MODES if mode in IN_FULL else QUICK_IN_EVERY_MODE


def _float32_cells() -> list:
    params = []
    for family, mode in FAMILY_MODES:
        for algorithm in ALGORITHMS:
            for cache in caches(mode):
                if cache == "extra_buffer":  # its like with overlap is what matters here
                    continue
                cell = Cell(Case(family, algorithm, cache, mode))
                quick = (algorithm, cache) in _quick(family, mode)
                params.append(parameter(cell, *(() if quick else (pytest.mark.slow,))))
    return params


def _two_ranks() -> list:
    """Rewinding and not, a tree and a chain, in the modes that verify by themselves."""
    kinds = (("nextn-tree", "rewind", "replay"), ("nextn-chain", "extra_buffer-overlap", "replay"))
    kinds += (("nextn-tree", "extra_buffer-overlap", "slots"),)
    return [parameter(Cell(Case(family, *kind), kind="two_ranks")) for family in FAMILIES for kind in kinds]


OWN_LAYOUT = {family: tuple(mode for mode in MODES[family] if not mode.endswith("-kv")) for family in FAMILIES}
"""A state is the same numbers in either layout: once is enough for what is about rounding."""


@pytest.mark.parametrize("cell", _float32_cells())
def test_float32(cell, engines):
    """Tokens and states equal the plain engine's."""
    check_equal(cell, engines)


BFLOAT16_CAP = 0.1
"""Relative error of a state in 16 bits that nothing may exceed; a wrong node's state is off by more than 1."""


def check_rounded(cell: Cell, engines: Engines) -> Result:
    """Tokens differ at ties only; states are no further from the plain engine's than stock's verify takes them.

    A verify multiplies other matrix shapes than a decode does, which plain engines do not show: `snapshot` does.
    """
    result, plain = engines[cell]
    check_engine(cell, result)
    limits = engines.spread(cell)
    wrong, ties = rounding.token_differences(result, plain, limits.tie)
    print(f"; spread {limits.state:.1e} ({limits.states} states), leads {limits.lead:.1e}; {len(ties)} ties", end="")
    assert not wrong, f"{len(wrong)} requests differ at no tie ({limits.tie:.1e}):\n  " + "\n  ".join(wrong)
    stock = compare_states(engines[stock_of(cell)][0], BFLOAT16_CAP)
    stock.check()
    comparison = compare_states(result, min(BFLOAT16_CAP, rounding.FACTOR * max(limits.state, stock.worst)))
    print(f"; stock {stock.worst:.1e}; {comparison.compared} states, worst {comparison.worst:.1e}", end="")
    comparison.check()
    return result


@pytest.mark.parametrize("cell", cells("nextn-tree", OWN_LAYOUT, dtype="bfloat16"))
def test_bfloat16(cell, engines):
    check_rounded(cell, engines)


# SGLang takes no snapshots with it for this model.
@pytest.mark.parametrize(
    "cell", cells("nextn-chain", {"gdn": ("replay", "slots")}, "no_buffer", dtype="bfloat16", kind="flashinfer")
)
def test_flashinfer(cell, engines):
    """``--linear-attn-backend flashinfer``: FlashInfer prefills and decodes heads as wide as real ones, we verify."""
    log = check_rounded(cell, engines).log
    assert "decode=FlashInferGDNKernel" in log and "extend=FlashInferGDNKernel" in log
    assert f"mode {cell.case.mode} verifies with its own kernels, not with flashinfer's" in log


@pytest.mark.parametrize(
    "cell",
    [
        *cells("nextn-tree", {"gdn": ("replay",)}, "rewind", dtype="bfloat16", kind="wide"),
        *cells("nextn-chain", {"gdn": ("replay", "slots")}, dtype="bfloat16", kind="wide"),
    ],
)
def test_wide(cell, engines):
    """Heads as wide as real ones, and every choice of a kernel left to SGLang: 0.5.23 prefills by FlashInfer's."""
    log = check_rounded(cell, engines).log
    takes_flashinfer = VERSION >= (0, 5, 19) and importlib.util.find_spec("cutlass") is not None
    assert ("extend=FlashInferGDNKernel" in log) == takes_flashinfer


@pytest.mark.parametrize("cell", cells("nextn-tree", DEFAULT_MODES, kind="eager"))
def test_graph_replay_equals_eager(cell, engines):
    """The same engine with and without CUDA graphs: the same tokens, and the same states where both show one."""
    eager = check_equal(cell, engines)
    captured, _ = engines[captured_of(cell)]
    assert not token_differences(captured, eager)
    states = {record.prefix: record.state for record in eager.records}
    errors = [relative_error(r.state, states[r.prefix]) for r in captured.records if r.prefix in states]
    assert errors and max(errors) <= STATE_BOUND


@pytest.mark.parametrize("cell", cells("nextn-tree", DEFAULT_MODES, kind="plan_stream"))
def test_plan_stream(cell, engines):
    """A verify is prepared on a stream of its own, while the forward before it may still run."""
    check_equal(cell, engines)


@pytest.mark.parametrize("cell", _two_ranks())
def test_two_ranks(cell, engines):
    """Tensor parallel, a GPU a rank: every rank's tokens, and states put together from both, equal one plain rank's."""
    check_equal(cell, engines)


@pytest.mark.parametrize("cell", cells("nextn-chain", DEFAULT_MODES, kind="adaptive"))
def test_adaptive(cell, engines):
    """N changes at run time, each N with its own graphs and backend."""
    result = check_equal(cell, engines)
    seen = set(adaptive.node_counts(result))  # which of 1 to 6 come up hangs on how many are running, and when
    assert 1 in seen and len(seen) >= 4, f"N was switched to {seen} only"
