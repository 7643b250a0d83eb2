"""The engine tests on a GPU: real kernels, CUDA graphs and overlap scheduling.

In float32 (`cuda_ops`) tokens equal the plain engine's and states agree to 1e-5, as on a CPU; in bfloat16 they differ
by no more than rounding does without speculation (`rounding`). States of running requests are recorded where there is
no overlap; elsewhere reading them would synchronise the streams and take it away, so states are read at radix inserts
and at the end. All engines that the chosen tests need run before the first test, several at a time.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from . import adaptive, harness, rounding, scenarios
from .harness import STATE_BOUND, EngineError, compare_states, plain_spec, token_differences
from .matrix import ALGORITHMS, CACHES, ENGINE, FAMILIES, FAMILY_MODES, IN_FULL, MODES, Case, caches
from .scenario import Scenario
from .spec import EngineSpec, Result
from .states import relative_error

pytestmark = pytest.mark.gpu

AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))

TIMEOUT = 400.0


@dataclass(frozen=True)
class Cell:
    """An engine to test. ``kind``: "" or what is special about it, a key of `_SPECIAL`."""

    case: Case
    dtype: str = "float32"
    kind: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.case.name, self.dtype, self.kind) if part)


_SPECIAL: dict[str, dict] = {
    "": {},
    "eager": {"extra": {"disable_cuda_graph": True}},
    "plan_stream": {"env": {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}},
    # 0.5.17 sizes a buffer of its graphs by the N it begins with: the largest. The settings name a file, see _spec.
    "adaptive": {"steps": 5, "draft_tokens": 6},
    # FlashInfer's all-reduce takes minutes to compile, and adds as NCCL does.
    "two_ranks": {"ranks": 2, "extra": {"enforce_disable_flashinfer_allreduce_fusion": True}},
}

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
                params.append(pytest.param(cell, id=cell.name, marks=() if quick else pytest.mark.slow))
    return params


def _cells(algorithm: str, modes: dict[str, tuple[str, ...]], **special: str) -> list:
    cells = [
        Cell(Case(family, algorithm, "extra_buffer-overlap", mode), **special)
        for family in FAMILIES
        for mode in modes[family]
    ]
    return [pytest.param(cell, id=cell.name) for cell in cells]


def _two_ranks() -> list:
    """Rewinding and not, a tree and a chain, in the modes that verify by themselves. Without two GPUs all are skipped,
    before any engine is started for them."""
    gpus = torch.cuda.device_count()
    marks = () if gpus > 1 else pytest.mark.skip(reason=f"needs two GPUs, there are {gpus}")
    kinds = (("nextn-tree", "rewind", "replay"), ("nextn-chain", "extra_buffer-overlap", "replay"))
    kinds += (("nextn-tree", "extra_buffer-overlap", "slots"),)
    cells = [Cell(Case(family, *kind), kind="two_ranks") for family in FAMILIES for kind in kinds]
    return [pytest.param(cell, id=cell.name, marks=marks) for cell in cells]


DEFAULT_MODES = {family: MODES[family][:1] for family in FAMILIES}

OWN_LAYOUT = {family: tuple(mode for mode in MODES[family] if not mode.endswith("-kv")) for family in FAMILIES}
"""A state is the same numbers in either layout: once is enough for what is about rounding."""


# -- running them --------------------------------------------------------------------------------------------------


def _todo(cell: Cell, vocab: int) -> tuple[Scenario, ...]:
    if cell.dtype == "float32":
        return scenarios.common(vocab)
    # Where a near-tie may flip a token, nothing may hang on the exact tokens of another request.
    return tuple(make(vocab) for make in (scenarios.turns, scenarios.shared, scenarios.chunked, scenarios.staggered))


def _spec(cell: Cell, model: str) -> EngineSpec:
    special = dict(_SPECIAL[cell.kind])
    if cell.kind == "adaptive":
        special["extra"] = adaptive.settings(model)
    if "extra" in special:
        special["extra"] = {**ENGINE[cell.case.family].get("extra", {}), **special["extra"]}
    live = not CACHES[cell.case.cache].get("overlap", False)
    return cell.case.spec(model, device="cuda", dtype=cell.dtype, record_live=live, timeout=TIMEOUT, **special)


SOLO = {
    "max_running_requests": 1,
    "extra": {"cuda_graph_bs_decode": [1]},
    "chunked_prefill_size": EngineSpec.chunked_prefill_size,
    "radix": "no_buffer",
}
"""The second plain engine of 16 bits: one request at a time, prompts in chunks and on top of cached states, as in the
engines under test."""


class Engines:
    """Results of the cells that the chosen tests need; a plain engine for each model beside them."""

    def __init__(self, cells: list[Cell], checkpoint):
        self._checkpoint = checkpoint
        self._todo = {cell: _todo(cell, checkpoint.vocab) for cell in cells}
        self._specs = {cell: _spec(cell, self._model(cell)) for cell in cells}
        plain = {plain_spec(spec).key(): (plain_spec(spec), self._todo[cell]) for cell, spec in self._specs.items()}
        solo = {key: (replace(spec, **SOLO), todo) for key, (spec, todo) in plain.items() if spec.dtype != "float32"}
        jobs = [*plain.values(), *solo.values(), *((self._specs[cell], self._todo[cell]) for cell in cells)]
        results = iter(harness.run_all(jobs, AT_ONCE))
        self._plain = {key: next(results) for key in plain}
        self._solo = {key: next(results) for key in solo}
        self._results = {cell: next(results) for cell in cells}
        for key, (_, todo) in plain.items():
            if isinstance(self._plain[key], Result):
                harness.remember(self._plain[key], todo)
        self._prefilled = self._prefill(plain)

    def _model(self, cell: Cell) -> str:
        """The family's checkpoint; SGLang takes the dtype of some weights from the configuration, not from --dtype."""
        original = Path(self._checkpoint(cell.case.family))
        folder = original.with_name(f"{original.name}-{cell.dtype}")
        if not folder.exists():
            shutil.copytree(original, folder)
            config = folder / "config.json"
            config.write_text(config.read_text().replace('"torch_dtype": "float32"', f'"torch_dtype": "{cell.dtype}"'))
        return str(folder)

    def _prefill(self, plain: dict[str, tuple[EngineSpec, tuple[Scenario, ...]]]) -> dict[str, Result | EngineError]:
        """States no plain engine has shown yet; in 16 bits also those it has, to see how far a prefill is from them."""
        wanted: dict[str, set] = {}
        for key, (spec, _) in plain.items():
            prefixes = [
                record.prefix
                for cell, result in self._results.items()
                if isinstance(result, Result) and plain_spec(self._specs[cell]).key() == key
                for record in result.records
            ]
            wanted[key] = harness.unknown(spec, prefixes)
            first = self._plain[key]
            if spec.dtype != "float32" and isinstance(first, Result):
                wanted[key] |= {record.prefix for record in first.records if record.kind == "decode"}
        jobs = {key: (plain[key][0], [harness.prefills(prefixes)]) for key, prefixes in wanted.items() if prefixes}
        results = dict(zip(jobs, harness.run_all(list(jobs.values()), AT_ONCE), strict=True))
        for result in results.values():
            if isinstance(result, Result):
                harness.remember(result, [])
        return results

    def __getitem__(self, cell: Cell) -> tuple[Result, Result]:
        """The cell's run and the plain engine's of the same scenarios."""
        key = plain_spec(self._specs[cell]).key()
        return _or_raise(self._results[cell]), _or_raise(self._plain[key])

    def spread(self, cell: Cell) -> rounding.Spread:
        """What rounding does to the plain engine of a cell."""
        key = plain_spec(self._specs[cell]).key()
        first = _or_raise(self._plain[key])
        return rounding.spread(first, [_or_raise(self._solo[key]), _or_raise(self._prefilled[key])])


def _or_raise(result: Result | EngineError) -> Result:
    if isinstance(result, EngineError):
        raise result
    return result


@pytest.fixture(scope="module")
def engines(request, checkpoint) -> Engines:
    cells: dict[Cell, None] = {}
    for item in request.session.items:
        if item.module is not request.module or item.get_closest_marker("skip") is not None:
            continue
        cell = item.callspec.params["cell"]
        cells[cell] = None
        if cell.kind == "eager":
            cells[_captured(cell)] = None
        if cell.dtype != "float32":
            cells[_stock(cell)] = None
    return Engines(list(cells), checkpoint)


# -- the tests -----------------------------------------------------------------------------------------------------


def _check_engine(cell: Cell, result: Result) -> None:
    """The engine was what the test's name says."""
    assert (result.graphs == 0) == (cell.kind == "eager"), f"{result.graphs} forwards replayed a graph"
    assert result.accept_length > 1.05, f"no drafts accepted ({result.accept_length:.2f}): proves nothing"
    assert result.cached_tokens > 0, "no prefix hits"


def _check_equal(cell: Cell, engines: Engines) -> Result:
    result, plain = engines[cell]
    _check_engine(cell, result)
    differences = token_differences(result, plain)
    assert not differences, f"{len(differences)} requests differ:\n  " + "\n  ".join(differences)
    comparison = compare_states(result, STATE_BOUND)
    print(f"; {comparison.compared} states, worst {comparison.worst:.1e} ({comparison.worst_where})", end="")
    comparison.check()
    return result


@pytest.mark.parametrize("cell", _float32_cells())
def test_float32(cell, engines):
    """Tokens and states equal the plain engine's."""
    _check_equal(cell, engines)


BFLOAT16_CAP = 0.1
"""Relative error of a state in 16 bits that nothing may exceed; a wrong node's state is off by more than 1."""


@pytest.mark.parametrize("cell", _cells("nextn-tree", OWN_LAYOUT, dtype="bfloat16"))
def test_bfloat16(cell, engines):
    """Tokens differ at ties only; states are no further from the plain engine's than stock's verify takes them.

    A verify multiplies other matrix shapes than a decode does, which plain engines do not show: `snapshot` does.
    """
    result, plain = engines[cell]
    _check_engine(cell, result)
    limits = engines.spread(cell)
    wrong, ties = rounding.token_differences(result, plain, limits.tie)
    print(f"; spread {limits.state:.1e} ({limits.states} states), leads {limits.lead:.1e}; {len(ties)} ties", end="")
    assert not wrong, f"{len(wrong)} requests differ at no tie ({limits.tie:.1e}):\n  " + "\n  ".join(wrong)
    stock = compare_states(engines[_stock(cell)][0], BFLOAT16_CAP)
    stock.check()
    comparison = compare_states(result, min(BFLOAT16_CAP, rounding.FACTOR * max(limits.state, stock.worst)))
    print(f"; stock {stock.worst:.1e}; {comparison.compared} states, worst {comparison.worst:.1e}", end="")
    comparison.check()


def _captured(cell: Cell) -> Cell:
    return replace(cell, kind="")


def _stock(cell: Cell) -> Cell:
    return replace(cell, case=replace(cell.case, mode="snapshot"))


@pytest.mark.parametrize("cell", _cells("nextn-tree", DEFAULT_MODES, kind="eager"))
def test_graph_replay_equals_eager(cell, engines):
    """The same engine with and without CUDA graphs: the same tokens, and the same states where both show one."""
    eager = _check_equal(cell, engines)
    captured, _ = engines[_captured(cell)]
    assert not token_differences(captured, eager)
    states = {record.prefix: record.state for record in eager.records}
    errors = [relative_error(r.state, states[r.prefix]) for r in captured.records if r.prefix in states]
    assert errors and max(errors) <= STATE_BOUND


@pytest.mark.parametrize("cell", _cells("nextn-tree", DEFAULT_MODES, kind="plan_stream"))
def test_plan_stream(cell, engines):
    """A verify is prepared on a stream of its own, while the forward before it may still run."""
    _check_equal(cell, engines)


@pytest.mark.parametrize("cell", _two_ranks())
def test_two_ranks(cell, engines):
    """Tensor parallel, a GPU a rank: every rank's tokens, and states put together from both, equal one plain rank's."""
    _check_equal(cell, engines)


@pytest.mark.parametrize("cell", _cells("nextn-chain", DEFAULT_MODES, kind="adaptive"))
def test_adaptive(cell, engines):
    """N changes at run time, each N with its own graphs and backend."""
    result = _check_equal(cell, engines)
    seen = set(adaptive.node_counts(result))  # which of 1 to 6 come up hangs on how many are running, and when
    assert 1 in seen and len(seen) >= 4, f"N was switched to {seen} only"
