"""Sessions, whose tokens SGLang keeps: every turn gets what a request with the whole conversation gets.

A plain session is no more than that. A streaming one keeps its request's row and state slot too; the guards decline it
for what SGLang makes of it with speculation, which is seen here.
"""

from __future__ import annotations

import dataclasses

import pytest

from . import scenarios
from .harness import baseline, check_equal, compare_states, run, token_differences
from .matrix import FAMILIES, Case, in_full
from .scenario import Scenario

DRAFTS = ("ngram-tree", "nextn-tree")

CACHES = ("no_buffer", "extra_buffer-overlap", "rewind")

FAST = {("gdn", "nextn-tree", "rewind", "replay"), ("mamba2", "ngram-tree", "no_buffer", "slots")}
"""An engine a family."""


def _told_in_full(scenario: Scenario) -> Scenario:
    """The scenario where every request sends the whole conversation."""
    requests = tuple(dataclasses.replace(request, session=None) for request in scenario.requests)
    return dataclasses.replace(scenario, requests=requests, streaming=False)


@pytest.mark.in_turn
@pytest.mark.parametrize("case", in_full(FAMILIES, DRAFTS, CACHES, FAST))
def test_a_session_answers_as_the_whole_conversation_does(case: Case, checkpoint):
    talks = scenarios.talks(checkpoint.vocab)
    result = run(case.spec(checkpoint(case.family)), [talks])
    assert result.outcomes["talks/a2"].cached_tokens > 0
    check_equal(result, [_told_in_full(talks)])


@pytest.mark.slow
@pytest.mark.parametrize("draft, cache", [("ngram-tree", "no_buffer"), ("nextn-tree", "extra_buffer-overlap")])
def test_stock_streaming_sessions_are_wrong(draft, cache, checkpoint):
    """A session's next turn begins behind the last token of the answer before, which nothing has run.

    If this fails it begins where the state is: try streaming sessions with the plugin.
    """
    talks = scenarios.talks(checkpoint.vocab)
    told = [request for request in talks.requests if request.rid != "branch"]  # a streaming session only goes on
    streaming = dataclasses.replace(talks, requests=tuple(told), streaming=True)
    spec = Case("gdn", draft, cache, "off").spec(checkpoint("gdn"))
    result = run(dataclasses.replace(spec, extra={"enable_streaming_session": True}), [streaming])
    assert token_differences(result, baseline(result.spec, [_told_in_full(streaming)])), "the answers were right"
    assert compare_states(result).bad, "the states were right"
