"""DFLASH: chains of 16 nodes that a second model drafts at once, from the target's inner states.

A plain engine writes down what it answers to every prompt. The draft knows it, and drafts it right for as many tokens
as it is a row's turn to be (`foresight`), so that every number of nodes from 1 to 16 is committed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
from collections.abc import Callable, Sequence

import pytest

from . import draft_models, foresight, scenarios
from .harness import EngineError, baseline, check_equal, import_sglang, plain_spec, run
from .matrix import FAMILIES, FEW_SLOTS, IN_FULL, MODES, Case, caches
from .scenario import Request, Scenario
from .spec import EngineSpec, Result
from .test_warm_up import CAPTURED
from .weights import VOCAB

OLD = importlib.metadata.version("sglang") == "0.5.17"
ALGORITHM = "dflash-chain"

FAST = {
    ("gdn", "rewind", "replay"),
    ("gdn", "extra_buffer-overlap", "slots"),
    ("mamba2", "rewind", "replay"),
    ("mamba2", "extra_buffer-overlap", "replay"),
    ("mamba2", "no_buffer", "slots"),
}


@pytest.fixture(scope="session")
def draft(tmp_path_factory) -> str:
    return str(draft_models.write_dflash(tmp_path_factory.mktemp("drafts") / "DFLASH"))


_answers: dict[str, tuple[foresight.Text, ...]] = {}


def _answered(spec: EngineSpec, todo: Sequence[Scenario]) -> tuple[foresight.Text, ...]:
    """What a plain engine answers to every prompt of the scenarios, a block further than it is asked for."""
    key = repr((spec.model, todo))
    if key not in _answers:
        prompts = sorted({tuple(outcome.prompt) for outcome in baseline(spec, todo).outcomes.values()})
        longest = max(request.max_new_tokens for scenario in todo for request in scenario.requests)
        asked = tuple(Request(f"t{i}", prompt, longest + spec.draft_tokens) for i, prompt in enumerate(prompts))
        result = run(plain_spec(spec), [Scenario("answers", asked)])
        _answers[key] = tuple((tuple(x.prompt), tuple(x.tokens)) for x in result.outcomes.values())
    return _answers[key]


@pytest.fixture
def verify(checkpoint, draft) -> Callable[..., Result]:
    """``verify(case, scenarios, **changes)`` runs them with drafts that know the answers; tokens and states are equal
    to a plain engine's."""

    def verify(case: Case, todo: Sequence[Scenario], model: str | None = None, **changes) -> Result:
        import_sglang()
        from sglang.srt.models.nemotron_h import NemotronHForCausalLM

        if case.family == "mamba2" and not hasattr(NemotronHForCausalLM, "set_dflash_layers_to_capture"):
            pytest.skip("SGLang's Nemotron-H shows its inner states from 0.5.19 on")
        model = model or checkpoint(case.family)
        known = _answered(case.spec(model), todo)
        result = run(case.spec(model, draft_model=draft, foreseen=known, **changes), todo)
        check_equal(result, todo)
        return result

    return verify


def _cells() -> list:
    cells = [(family, cache, mode) for family in FAMILIES for mode in MODES[family] for cache in caches(mode)]
    return [
        pytest.param(
            Case(family, ALGORITHM, cache, mode), id=f"{family}-{cache}-{mode}", marks=_marks(family, cache, mode)
        )
        for family, cache, mode in cells
    ]


def _marks(family: str, cache: str, mode: str) -> list[pytest.MarkDecorator]:
    marks = [] if (family, cache, mode) in FAST else [pytest.mark.slow]
    if cache == "extra_buffer_lazy":
        marks.append(pytest.mark.skipif(OLD, reason="SGLang has it for DFLASH from 0.5.18 on"))
    return marks


@pytest.mark.parametrize("case", _cells())
def test_speculation_changes_nothing(case: Case, checkpoint, verify):
    """Prefix hits, answers that end at every offset of an accepted run, and runs of every length."""
    vocab = checkpoint.vocab
    result = verify(case, [scenarios.turns(vocab), scenarios.limits(vocab)])
    assert result.cached_tokens > 0
    assert foresight.accepted(result.records) == set(range(1, draft_models.BLOCK + 1))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["rewind", "no_buffer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_else_that_befalls_a_request(family, cache, checkpoint, verify):
    """Chunked prefill, staggered arrivals, stops and aborts, a flush, grammars."""
    vocab = checkpoint.vocab
    verify(Case(family, ALGORITHM, cache, "replay"), [*scenarios.common(vocab), scenarios.grammars(vocab)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, cache, mode",
    [*itertools.product(FAMILIES, ["rewind", "extra_buffer-overlap"], ["replay"]), ("gdn", "no_buffer", "slots")],
)
def test_few_slots(family, cache, mode, checkpoint, verify):
    """The same where requests are retracted and cached states evicted all the time."""
    result = verify(Case(family, ALGORITHM, cache, mode), [scenarios.pressure(checkpoint.vocab)], **FEW_SLOTS[cache])
    assert sum(outcome.retractions for outcome in result.outcomes.values()) > 0, "nothing was retracted"


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="its allocator of pages is a GPU kernel")
@pytest.mark.parametrize("family", FAMILIES)
def test_pages(family, checkpoint, verify):
    case = Case(family, ALGORITHM, "rewind", "replay")
    result = verify(case, [scenarios.turns(checkpoint.vocab)], page_size=16, track_interval=64)
    assert result.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("family, mode", itertools.product(FAMILIES, IN_FULL))
def test_two_ranks(family, mode, checkpoint, verify):
    """Tensor parallel: tokens of every rank, and states put together from both."""
    case = Case(family, ALGORITHM, "extra_buffer-overlap", mode)
    assert verify(case, [scenarios.turns(checkpoint.vocab)], ranks=2).cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("model, mode", [("qwen3_5", "replay"), ("qwen3_5_moe", "slots")])
def test_other_models(model, mode, written, verify):
    case = Case("gdn", ALGORITHM, "rewind" if mode == "replay" else "extra_buffer-overlap", mode)
    verify(case, [scenarios.turns(VOCAB - 5)], model=written(model))


@pytest.mark.slow
@pytest.mark.parametrize("cache, mode", [("rewind", "replay"), ("extra_buffer-overlap", "slots")])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_compiled_while_serving(family, cache, mode, checkpoint, verify):
    result = verify(Case(family, ALGORITHM, cache, mode), [scenarios.turns(checkpoint.vocab)], count_compiled=True)
    assert len(result.compiled) > 3
    assert [name for name in result.compiled_late if not name.startswith(CAPTURED)] == []


def test_snapshots_that_two_verifies_may_write_are_refused(checkpoint, draft):
    """With overlap a verify is planned before the one ahead of it has been read: both would take the same slot. From
    0.5.19 on snapshots are a chunk apart at least, 64 here; where states are rewound none are taken."""

    def start(cache: str) -> None:
        case = Case("gdn", ALGORITHM, cache, "replay")
        run(case.spec(checkpoint("gdn"), draft_model=draft, track_interval=16), [])

    refused = pytest.raises(EngineError, match=r"--mamba-track-interval 16: .*use 32 or more")
    with refused if OLD else contextlib.nullcontext():
        start("extra_buffer-overlap")
    start("rewind")


def test_models_that_hide_their_inner_states_are_refused(written, draft):
    """No model of SGLang's but these has anything to hand them out with; it says so itself once it is loaded."""
    spec = Case("mamba2", ALGORITHM, "no_buffer", "replay").spec(written("falcon_h1"), draft_model=draft)
    with pytest.raises(EngineError, match=r"--speculative-algorithm DFLASH: .*FalconH1ForCausalLM"):
        run(spec, [])
