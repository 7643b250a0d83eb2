"""Engines on a GPU: what the cells of test_gpu*.py need runs before the first of their tests, several at a time.

Each engine is a process of its own. Beside the cells' run plain engines (one a model and set of activations), and what
else a cell is compared with. In float32 (`cuda_ops`) tokens equal the plain engine's and states agree to 1e-5, as on a
CPU. States of running requests are recorded where there is no overlap; elsewhere reading them would synchronise the
streams and take it away, so states are read at radix inserts and at the end.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from . import adaptive, cuda_ops, draft_models, harness, models, rounding, scenarios
from .harness import STATE_BOUND, EngineError, compare_states, plain_spec, token_differences
from .matrix import CACHES, ENGINE, FAMILIES, MODES, Case
from .scenario import Scenario
from .spec import EngineSpec, Result

AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))

TIMEOUT = 400.0

VERSION = tuple(int(part) for part in importlib.metadata.version("sglang").split(".")[:3])
"""SGLang's."""


@dataclass(frozen=True)
class Cell:
    """An engine to test. ``kind``: "" or what is special about it, a key of `KINDS`; ``states``: the dtype of its
    recurrent states where it is not float32."""

    case: Case
    dtype: str = "float32"
    kind: str = ""
    states: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.case.name, self.dtype, self.kind, self.states) if part)


# FlashInfer's all-reduce takes minutes to compile, and adds as NCCL does.
_NCCL = {"enforce_disable_flashinfer_allreduce_fusion": True}

KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "eager": {"extra": {"disable_cuda_graph": True}},
    "plan_stream": {"env": {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}},
    # 0.5.17 sizes a buffer of its graphs by the N it begins with: the largest. The settings name a file, see _spec.
    "adaptive": {"steps": 5, "draft_tokens": 6},
    "two_ranks": {"ranks": 2, "extra": _NCCL},
    "expert_parallel": {"ranks": 2, "extra": {**_NCCL, "ep_size": 2}},
    "data_parallel": {"ranks": 2, "data_parallel": True, "extra": _NCCL},
    # What an ancestor mask has room for; SGLang wants snapshots no closer, whoever takes any.
    "nodes64": {"topk": 8, "steps": 11, "draft_tokens": 64, "track_interval": 64},
    "standalone": {},
    "eagle3": {},
    # In a graph nobody could say which drafts are right (`foresight`).
    "dflash": {"env": {"SGLANG_DFLASH_EAGER_DRAFT_SAMPLER": "1"}},
    "narrow": {},
    "sampled": {"seeded": True},
    "flashinfer": {"extra": {"linear_attn_backend": "flashinfer"}},
    "wide": {},
    "compile": cuda_ops.COMPILING,
}
"""What of an `EngineSpec` makes an engine special."""

WIDE = ("flashinfer", "wide")
"""Kinds whose heads are as wide as real models', which FlashInfer's kernels need."""

BESIDE_STOCK = ("narrow", "sampled")
"""Kinds that are compared with SGLang's verify in float32 too."""

DRAFTS = {
    ("standalone", "gdn"): "STANDALONE",
    ("standalone", "mamba2"): "STANDALONE",
    ("eagle3", "gdn"): "EAGLE3",
    ("eagle3", "mamba2"): "EAGLE3-last",  # SGLang's Mamba2 models hand out no states but their last ones
    ("dflash", "gdn"): "DFLASH",
    ("dflash", "mamba2"): "DFLASH",
}
"""Keys of `draft_models.WRITERS`, by kind and family."""

DEFAULT_MODES = {family: MODES[family][:1] for family in FAMILIES}


def cells(algorithm: str, modes: dict[str, tuple[str, ...]], cache: str = "extra_buffer-overlap", **special) -> list:
    """A cell a family and mode, as pytest parameters."""
    found = [Cell(Case(family, algorithm, cache, mode), **special) for family in modes for mode in modes[family]]
    return [parameter(cell) for cell in found]


def parameter(cell: Cell, *marks: pytest.MarkDecorator) -> Any:
    """A cell as a pytest parameter. What cannot run here is skipped before any engine is started."""
    gpus = torch.cuda.device_count()
    if KINDS[cell.kind].get("ranks", 1) > max(1, gpus):
        marks = (pytest.mark.skip(reason=f"needs two GPUs, there are {gpus}"), *marks)
    if cell.kind == "flashinfer" and importlib.util.find_spec("cutlass") is None:
        marks = (pytest.mark.skip(reason="no CuTe-DSL, which FlashInfer's kernels need"), *marks)
    return pytest.param(cell, id=cell.name, marks=marks)


# -- what is run ---------------------------------------------------------------------------------------------------


def _todo(cell: Cell, vocab: int) -> tuple[Scenario, ...]:
    if cell.kind == "narrow":
        return (scenarios.turns(vocab),)
    if cell.kind == "sampled":
        return (scenarios.drawn(vocab), scenarios.drawn_for_long(vocab))
    if cell.kind == "data_parallel":  # two a rank, so uneven that each of them idles while the other works
        return scenarios.unhurried(vocab)
    if cell.dtype == "float32":
        return scenarios.common(vocab)
    return scenarios.unhurried(vocab)  # a near-tie may flip a token


def _spec(cell: Cell, model: str) -> EngineSpec:
    case, special = cell.case, dict(KINDS[cell.kind])
    if cell.kind == "adaptive":
        special["extra"] = adaptive.settings(model)
    if cell.kind == "narrow":
        special["extra"] = {"mamba_ssm_dtype": cell.states}
    if draft := DRAFTS.get((cell.kind, case.family)):
        special["draft_model"] = _written(Path(f"{model}-{draft}"), draft_models.WRITERS[draft])
    if "extra" in special:
        special["extra"] = {**ENGINE[case.family].get("extra", {}), **special["extra"]}
    # Comparing hundreds of a real width's states takes longer than the engines.
    live = not CACHES[case.cache].get("overlap", False) and cell.kind not in WIDE
    return case.spec(model, device="cuda", dtype=cell.dtype, record_live=live, timeout=TIMEOUT, **special)


def _written(folder: Path, write: Callable[[Path], Any]) -> str:
    if not (folder / "config.json").exists():
        write(folder)
    return str(folder)


SOLO = {
    "max_running_requests": 1,
    "extra": {"cuda_graph_bs_decode": [1]},
    "chunked_prefill_size": EngineSpec.chunked_prefill_size,
    "radix": "no_buffer",
}
"""The second plain engine of 16 bits: one request at a time, prompts in chunks and on top of cached states, as in the
engines under test."""


def _beside(cell: Cell, spec: EngineSpec) -> EngineSpec | None:
    """An engine without speculation that the cell is compared with too: what it is special for, and nothing else."""
    if cell.kind == "data_parallel":  # SGLang has no rewinding; it has no trouble with snapshots without speculation
        return replace(spec, spec=None, mode="off", env={}, radix="extra_buffer")
    if cell.kind == "narrow":
        return replace(plain_spec(spec), extra={"mamba_ssm_dtype": cell.states})
    return None if cell.dtype == "float32" else replace(plain_spec(spec), **SOLO)


Job = tuple[EngineSpec, tuple[Scenario, ...]]


def _merged(jobs: Sequence[Job]) -> dict[str, Job]:
    """Each engine once, by the key of its spec, with all that is asked of it."""
    found: dict[str, Job] = {}
    for spec, todo in jobs:
        _, before = found.get(spec.key(), (spec, ()))
        found[spec.key()] = spec, tuple(dict.fromkeys((*before, *todo)))
    return found


class Engines:
    """Results of the cells that the chosen tests need; a plain engine for each model beside them."""

    def __init__(self, cells: Sequence[Cell], checkpoint: Any):
        self._checkpoint = checkpoint
        self._todo = {cell: _todo(cell, checkpoint.vocab) for cell in cells}
        self._specs = {cell: _spec(cell, self._model(cell)) for cell in cells}
        self._besides = {cell: spec for cell in cells if (spec := _beside(cell, self._specs[cell])) is not None}
        plain = _merged([(plain_spec(self._specs[cell]), self._todo[cell]) for cell in cells])
        beside = _merged([(spec, self._todo[cell]) for cell, spec in self._besides.items()])
        knowing = [cell for cell in cells if cell.kind == "dflash"]  # these must be told what the plain engine answers
        first = [cell for cell in cells if cell not in knowing]
        jobs = [*plain.values(), *beside.values(), *((self._specs[cell], self._todo[cell]) for cell in first)]
        results = iter(harness.run_all(jobs, AT_ONCE))
        self._plain = {key: next(results) for key in plain}
        self._beside = {key: next(results) for key in beside}
        self._results = {cell: next(results) for cell in first}
        for key, (_, todo) in plain.items():
            if isinstance(self._plain[key], Result):
                harness.remember(self._plain[key], todo)
        told = [(self._knowing(cell), self._todo[cell]) for cell in knowing]
        self._results |= dict(zip(knowing, harness.run_all(told, AT_ONCE), strict=True))
        self._prefilled = self._prefill(plain)
        self._spreads: dict[tuple[str, str], rounding.Spread] = {}

    def _model(self, cell: Cell) -> str:
        """The family's checkpoint; SGLang takes the dtype of some weights from the configuration, not from --dtype."""
        original = Path(self._checkpoint(cell.case.family))
        wide = cell.kind in WIDE
        folder = original.with_name(f"{original.name}-{cell.dtype}{'-wide' if wide else ''}")
        if not folder.exists():
            if wide:
                models.write_wide_qwen3_next(folder)
            else:
                shutil.copytree(original, folder)
            config = folder / "config.json"
            config.write_text(config.read_text().replace('"torch_dtype": "float32"', f'"torch_dtype": "{cell.dtype}"'))
        return str(folder)

    def _knowing(self, cell: Cell) -> EngineSpec:
        """The cell's engine, whose draft knows the plain engine's longest answer to every prompt."""
        plain = self._plain[plain_spec(self._specs[cell]).key()]
        if isinstance(plain, EngineError):
            return self._specs[cell]
        texts = [(tuple(outcome.prompt), tuple(outcome.tokens)) for outcome in plain.outcomes.values()]
        longest = dict(sorted(texts, key=lambda text: len(text[1])))
        return replace(self._specs[cell], foreseen=tuple(longest.items()))

    def _prefill(self, plain: dict[str, Job]) -> dict[str, Result | EngineError]:
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
        result = _or_raise(self._results[cell])
        _or_raise(self._plain[plain_spec(self._specs[cell]).key()])
        return result, harness.baseline(self._specs[cell], self._todo[cell])

    def beside(self, cell: Cell) -> Result:
        """The run of the other engine without speculation that the cell is compared with."""
        return _or_raise(self._beside[self._besides[cell].key()])

    def spread(self, cell: Cell) -> rounding.Spread:
        """What rounding does to the plain engine of a cell."""
        key, beside = plain_spec(self._specs[cell]).key(), self._besides[cell].key()
        if (key, beside) not in self._spreads:
            others = [self.beside(cell), _or_raise(self._prefilled[key])]
            self._spreads[key, beside] = rounding.spread(_or_raise(self._plain[key]), others)
        return self._spreads[key, beside]


def _or_raise(result: Result | EngineError) -> Result:
    if isinstance(result, EngineError):
        raise result
    return result


# -- for the tests -------------------------------------------------------------------------------------------------


def stock_of(cell: Cell) -> Cell:
    """The same engine with SGLang's own verify, which rewinds nothing; with narrow states without the plugin."""
    cache = "extra_buffer-overlap" if cell.case.cache == "rewind" else cell.case.cache
    return replace(cell, case=replace(cell.case, mode="off" if cell.kind == "narrow" else "snapshot", cache=cache))


def captured_of(cell: Cell) -> Cell:
    """The same engine with CUDA graphs."""
    return replace(cell, kind="")


def also_needed(cell: Cell) -> list[Cell]:
    """The cells that a cell's test looks at too."""
    if cell.kind == "eager":
        return [captured_of(cell)]
    return [stock_of(cell)] if cell.dtype != "float32" or cell.kind in BESIDE_STOCK else []


def chosen(module: Any, items: Sequence[pytest.Item]) -> list[Cell]:
    """The cells of those of a module's tests that will run, and what these look at too."""
    found: dict[Cell, None] = {}
    for item in items:
        if item.module is module and item.get_closest_marker("skip") is None:
            cell = item.callspec.params["cell"]
            found |= dict.fromkeys([cell, *also_needed(cell)])
    return list(found)


def check_engine(cell: Cell, result: Result) -> None:
    """The engine was what the test's name says."""
    assert (result.graphs == 0) == (cell.kind == "eager"), f"{result.graphs} forwards replayed a graph"
    assert result.accept_length > 1.05, f"no drafts accepted ({result.accept_length:.2f}): proves nothing"
    assert result.cached_tokens > 0, "no prefix hits"


def check_equal(cell: Cell, engines: Engines) -> Result:
    """Tokens and states equal the plain engine's."""
    result, plain = engines[cell]
    check_engine(cell, result)
    differences = token_differences(result, plain)
    assert not differences, f"{len(differences)} requests differ:\n  " + "\n  ".join(differences)
    check_states(result)
    return result


def check_states(result: Result) -> None:
    """States equal the plain engine's after the same tokens."""
    comparison = compare_states(result, STATE_BOUND)
    print(f"; {comparison.compared} states, worst {comparison.worst:.1e} ({comparison.worst_where})", end="")
    comparison.check()
