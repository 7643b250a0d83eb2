"""Mixed chunked prefill: a running request decodes one token at a time, as a tail of other requests' prefills."""

from __future__ import annotations

import pytest

from . import scenarios
from .harness import STATE_BOUND, baseline, check_equal, compare_states, run, token_differences
from .matrix import CACHES, FAMILIES, FAST_MIXED, MIXED, Case, cases, in_modes
from .scenario import Request, Scenario
from .spec import Result

NEXTN = ("nextn-chain", "nextn-tree")
REFUSED = ("rewind",)  # mixed chunks decode outside a verify


def _check_tails(result: Result, version: str) -> None:
    """That requests ended as tails. Up to 0.5.18 SGLang turns mixed chunks off under speculation."""
    ended = result.ended_as_tails
    assert ended == 0 if version in ("0.5.17", "0.5.18") else ended > 3, f"{ended} requests ended as tails of a prefill"


@pytest.mark.parametrize("case", cases(FAST_MIXED, NEXTN, without=REFUSED, dealt=False))
def test_mixed_chunk(case: Case, checkpoint, sglang_version):
    """A request that ends as a tail is cached with the token its state has and SGLang leaves out."""
    todo = [scenarios.mixed(checkpoint.vocab)]
    result = run(case.spec(checkpoint(case.family), extra=MIXED), todo)
    _check_tails(result, sglang_version)
    check_equal(result, todo)
    follow_ups = {key: outcome.cached_tokens for key, outcome in result.outcomes.items() if "/f_" in key}
    hits = sum(cached > 0 for cached in follow_ups.values())
    # with a buffer there is a hit only where a prefill's chunk has a boundary to snapshot at
    assert hits == len(follow_ups) if case.cache == "no_buffer" else hits > 0, f"prefix hits: {follow_ups}"


@pytest.mark.slow
@pytest.mark.parametrize("cache", [cache for cache in CACHES if cache not in REFUSED])
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_else_with_mixed_chunks(family, cache, checkpoint):
    case = Case(family, "nextn-tree", cache, "replay")
    todo = [*scenarios.common(checkpoint.vocab), scenarios.boundaries(checkpoint.vocab)]
    check_equal(run(case.spec(checkpoint(case.family), extra=MIXED), todo), todo)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_is_wrong(family, checkpoint, sglang_version):
    """If this fails, SGLang counts the token of a request that ends as a tail: drop our count for that version."""
    if sglang_version in ("0.5.17", "0.5.18"):
        pytest.skip("mixes nothing under speculation")
    todo = [scenarios.mixed(checkpoint.vocab)]
    result = run(Case(family, "nextn-chain", "no_buffer", "off").spec(checkpoint(family), extra=MIXED), todo)
    assert token_differences(result, baseline(result.spec, todo)), "stock gave the right tokens"
    assert compare_states(result).bad, "stock gave the right states"


@pytest.mark.parametrize("mode", in_modes(["replay", "slots", "snapshot"]))
def test_uncounted_tail_is_seen(mode, checkpoint, sglang_version):
    """With our count taken out the comparison fails, in a state under a key that is one token short."""
    if sglang_version in ("0.5.17", "0.5.18"):
        pytest.skip("mixes nothing under speculation")
    case = Case("mamba2", "nextn-chain", "no_buffer", mode)
    result = run(case.spec(checkpoint("mamba2"), extra=MIXED, sabotage="uncounted_tail"), [_one_tail(checkpoint.vocab)])
    assert result.ended_as_tails == 1
    wrong = [record for record in compare_states(result).bad if record.startswith("insert")]
    assert len(wrong) == 1, wrong
    assert compare_states(result).worst > 1000 * STATE_BOUND


MASKED = [
    ("gdn", "nextn-tree", "extra_buffer-overlap"),
    ("mamba2", "nextn-chain", "extra_buffer_lazy"),
]
"""What overlaps: where a tail is sampled before the last verify's result has been looked at."""


@pytest.mark.parametrize("mode", in_modes(["replay", "slots", "snapshot"]))
@pytest.mark.parametrize(("family", "algorithm", "cache"), MASKED)
def test_a_tail_obeys_its_grammar(family, algorithm, cache, mode, checkpoint, sglang_version):
    """Its token is masked by all tokens before it, those of the last verify among them."""
    todo = [scenarios.mixed_grammars(checkpoint.vocab)]
    result = run(Case(family, algorithm, cache, mode).spec(checkpoint(family), extra=MIXED), todo)
    _check_tails(result, sglang_version)
    check_equal(result, todo)


@pytest.mark.parametrize(("family", "algorithm", "cache"), MASKED)
def test_stock_forgets_the_grammar(family, algorithm, cache, checkpoint, sglang_version):
    """If this fails, SGLang advances grammars before it samples a tail: drop our call for that version."""
    if sglang_version in ("0.5.17", "0.5.18"):
        pytest.skip("mixes nothing under speculation")
    todo = [scenarios.mixed_grammars(checkpoint.vocab)]
    result = run(Case(family, algorithm, cache, "off").spec(checkpoint(family), extra=MIXED), todo)
    ended = {key for key, outcome in result.outcomes.items() if outcome.aborted}
    assert ended and all("/g" in key for key in ended), f"ended with an abort: {ended}"
    assert "Grammar accept_token failed" in result.log


def _one_tail(vocab: int) -> Scenario:
    prompt, long = scenarios.repetitive(1, 30, vocab), scenarios.tokens(2, 300, vocab)
    return Scenario("one_tail", (Request("ends", prompt, 7), Request("long", long, 4, when=("ends", 3))))
