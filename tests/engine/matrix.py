"""The one place that says which engine configurations are tested, and which of them in every CI run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import pytest

from .spec import EngineSpec

FAMILIES = ("gdn", "mamba2")

LAYOUT = "SGLANG_MAMBA_MTP_STATE_LAYOUT"

VARIANTS = {
    "replay": {"mode": "replay"},
    "slots": {"mode": "slots"},
    "replay-kv": {"mode": "replay", "env": {LAYOUT: "kv"}},
    "slots-kv": {"mode": "slots", "env": {LAYOUT: "kv"}},
    "snapshot": {"mode": "snapshot"},
    "off": {"mode": "off"},
}
"""Modes, and their options where these change what is written to the pool."""

MODES = {family: tuple(name for name in VARIANTS if name != "off") for family in FAMILIES}
"""Per family, the variants that must equal the plain engine, the default mode first. A new mode goes here."""

IN_FULL = ("replay", "slots")
"""Variants that run all fast cells below, the second of them on one version; the others run `FAST_IN_EVERY_MODE`."""

EVERYWHERE = "replay"
"""The variant that runs every special scenario on every SGLang version, what takes long in some cells (``in_turn``).

Of equality a version meets `FAST_IN_BOTH` and half of the other cells. The other variants meet scenarios and cells on
one version (`marks`): what a variant keeps of drafts is its own, how requests are scheduled is the version's, and each
pair of variant, version and scenario is met. With ``--slow``, all three together.
"""

FAMILY_MODES = [(family, mode) for family in FAMILIES for mode in MODES[family]]

ALGORITHMS = {
    "ngram-chain": {"spec": "NGRAM", "bfs_breadth": 1, "draft_tokens": 6},
    "ngram-tree": {"spec": "NGRAM", "bfs_breadth": 4, "draft_tokens": 8},
    "nextn-chain": {"spec": "NEXTN", "topk": 1, "steps": 3, "draft_tokens": 4},
    "nextn-tree": {"spec": "NEXTN", "topk": 3, "steps": 3, "draft_tokens": 8},
}

SECOND_MODEL = {
    "standalone-chain": {"spec": "STANDALONE", "topk": 1, "steps": 3, "draft_tokens": 4},
    "standalone-tree": {"spec": "STANDALONE", "topk": 3, "steps": 3, "draft_tokens": 8},
    "eagle3-chain": {"spec": "EAGLE3", "topk": 1, "steps": 3, "draft_tokens": 4},
    "eagle3-tree": {"spec": "EAGLE3", "topk": 3, "steps": 3, "draft_tokens": 8},
}
"""Drafts of a second model, which the spec must name."""

BLOCKS = {
    # No two verifies may cross an interval's boundary each: a request that ends with the first would be cached with the
    # second's state.
    "dflash-chain": {"spec": "DFLASH", "topk": 1, "steps": 1, "draft_tokens": 16, "track_interval": 32},
}
"""Drafts that a second model makes at once, a chain."""

ENGINE = {
    "gdn": {},
    # Snapshots fall on multiples of the chunk size, which GDN fixes at 64 and Mamba2 takes from the configuration.
    "mamba2": {"extra": {"json_model_override_args": '{"mamba_chunk_size": 16}'}},
}
"""Per family, what else its engines need."""

CACHES = {
    "no_buffer": {"radix": "no_buffer"},  # SGLang refuses overlap with it
    "extra_buffer": {"radix": "extra_buffer"},
    "extra_buffer-overlap": {"radix": "extra_buffer", "overlap": True},
    "extra_buffer_lazy": {"radix": "extra_buffer_lazy", "overlap": True},  # SGLang refuses it without overlap
    "rewind": {"radix": "auto", "overlap": True, "env": {"SGLANG_MAMBA_MTP_RADIX": "rewind"}},
}
"""Radix cache strategies, and overlap scheduling (results are processed one step late) where SGLang allows it; rewind
is the plugin's own, in replay."""

FAST = {
    ("gdn", "ngram-chain", "no_buffer"),
    ("gdn", "ngram-tree", "extra_buffer"),
    ("gdn", "nextn-chain", "extra_buffer_lazy"),
    ("gdn", "nextn-tree", "no_buffer"),
    ("gdn", "nextn-tree", "extra_buffer-overlap"),
    ("gdn", "nextn-tree", "rewind"),
    ("mamba2", "ngram-chain", "extra_buffer-overlap"),
    ("mamba2", "ngram-tree", "rewind"),
    ("mamba2", "ngram-tree", "extra_buffer_lazy"),
    ("mamba2", "nextn-chain", "extra_buffer"),
    ("mamba2", "nextn-tree", "no_buffer"),
}
"""What runs without ``-m slow`` in `IN_FULL`: every family, algorithm and cache at least once."""

FAST_IN_EVERY_MODE = {("gdn", "nextn-tree", "extra_buffer-overlap"), ("mamba2", "ngram-tree", "extra_buffer_lazy")}
"""Those of them that run in every variant."""

FAST_IN_BOTH = FAST_IN_EVERY_MODE | {
    ("gdn", "nextn-tree", "no_buffer"),
    ("gdn", "ngram-tree", "extra_buffer-overlap"),
    ("mamba2", "ngram-chain", "extra_buffer"),
}
"""Cells that run on every version, in the variant that runs everywhere: some of either family and set."""

FAST_FEW_SLOTS = {
    ("gdn", "ngram-tree", "extra_buffer-overlap"),
    ("gdn", "nextn-tree", "no_buffer"),
    ("gdn", "nextn-chain", "extra_buffer_lazy"),
    ("gdn", "ngram-chain", "rewind"),
    ("mamba2", "ngram-chain", "extra_buffer"),
    ("mamba2", "nextn-tree", "rewind"),
    ("mamba2", "nextn-tree", "no_buffer"),
}
"""The same for the tests on a small engine."""

MIXED = {"enable_mixed_chunk": True}
"""Running requests decode one token each in the batches of prefills; SGLang does so for NEXTN alone."""

FAST_MIXED = {("gdn", "nextn-tree", "no_buffer"), ("mamba2", "nextn-chain", "no_buffer")}
"""The strategy under which a request's own state is cached."""

FEW_SLOTS = {
    cache: {
        "max_running_requests": 4,
        "max_mamba_cache_size": {"no_buffer": 9, "rewind": 10}.get(cache, 17),
        "retract_every": 7,
    }
    for cache in CACHES
}
"""Engines so small that they evict all the time: four requests' slots (three each with a buffer) and five more."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; ``mode`` is a key of `VARIANTS`."""

    family: str
    algorithm: str
    cache: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.algorithm}-{self.cache}-{self.mode}"

    def spec(self, model: str, **changes) -> EngineSpec:
        """The engine of this cell on a checkpoint."""
        engine = ENGINE[self.family]
        cache = dict(CACHES[self.cache])
        env = VARIANTS[self.mode].get("env", {}) | cache.pop("env", {}) | changes.pop("env", {})
        extra = engine.get("extra", {}) | changes.pop("extra", {})
        settings = {
            **engine,
            **(ALGORITHMS | SECOND_MODEL | BLOCKS)[self.algorithm],
            **cache,
            **changes,
            "extra": extra,
        }
        return EngineSpec(model=model, mode=VARIANTS[self.mode]["mode"], env=env, **settings)


def marks(mode: str, quick: bool = True) -> tuple[pytest.MarkDecorator, ...]:
    """Of a special test in a variant: none in the one that runs everywhere, ``once`` in the others, or ``slow``."""
    if not quick:
        return (pytest.mark.slow,)
    return () if mode == EVERYWHERE else (pytest.mark.once,)


def in_families(modes: Iterable[str], quick: Collection[tuple[str, str]]) -> list:
    """Families x ``modes`` as pytest parameters with `marks`: those of ``quick`` without --slow, the rest with it."""
    every = itertools.product(FAMILIES, modes)
    return [pytest.param(*each, marks=marks(each[1], each in quick)) for each in every]


def in_modes(modes: Iterable[str], *first: Iterable[str]) -> list:
    """``first`` x ``modes`` as pytest parameters, the mode last, each with its `marks`; a cache of `CACHES` among the
    first is one that the mode runs with."""
    return [
        pytest.param(*entry, id="-".join(entry), marks=marks(entry[-1]))
        for entry in itertools.product(*first, modes)
        if CACHES.keys() & entry <= {*caches(entry[-1])}
    ]


def caches(mode: str) -> tuple[str, ...]:
    """What of `CACHES` a variant of `VARIANTS` runs with: only replay can rewind."""
    return tuple(cache for cache in CACHES if cache != "rewind" or VARIANTS[mode]["mode"] == "replay")


def _marks_in_matrix(mode: str, cell: tuple[str, str, str], quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Of a cell of the matrix: those of `FAST_IN_BOTH` run on every version in the variant that runs everywhere, and in
    the other of `IN_FULL` in turn, as the rest does in the former."""
    if not quick or (mode != EVERYWHERE and (mode not in IN_FULL or cell not in FAST_IN_BOTH)):
        return marks(mode, quick)
    return () if mode == EVERYWHERE and cell in FAST_IN_BOTH else (pytest.mark.in_turn,)


def cases(
    fast: set[tuple[str, str, str]] = FAST,
    algorithms: Iterable[str] = tuple(ALGORITHMS),
    without: Iterable[str] = (),
    dealt: bool = True,
) -> list:
    """Every cell as a pytest parameter, those of the caches ``without`` left out; those outside ``fast`` carry the
    ``slow`` marker. dealt: False where a version does not do what is tested, so that no cell may be its alone."""
    params = []
    for (family, mode), algorithm, cache in itertools.product(FAMILY_MODES, algorithms, CACHES):
        if cache not in caches(mode) or cache in without:
            continue
        case = Case(family, algorithm, cache, mode)
        cell = (family, algorithm, cache)
        quick = cell in fast and (mode in IN_FULL or cell in FAST_IN_EVERY_MODE)
        its_marks = _marks_in_matrix(mode, cell, quick) if dealt else marks(mode, quick)
        params.append(pytest.param(case, id=case.name, marks=its_marks))
    return params


def in_full(
    families: Iterable[str], drafts: Iterable[str], of: Iterable[str], fast: set[tuple[str, str, str, str]]
) -> list:
    """``families`` x ``drafts`` x `IN_FULL` x the caches ``of`` that the mode runs with, as pytest parameters; those
    outside ``fast``, of (family, draft, cache, mode), carry the ``slow`` marker."""
    cells = [
        (family, draft, cache, mode)
        for family, draft, mode, cache in itertools.product(families, drafts, IN_FULL, of)
        if cache in caches(mode)
    ]
    return [pytest.param(Case(*c), id="-".join(c), marks=() if c in fast else pytest.mark.slow) for c in cells]
