"""Identity, and what passes for a tie."""

from __future__ import annotations

import pytest
from mtp_demo import compare
from mtp_demo.compare import Difference

from .builders import scored, sure

BOUND = 0.25
PART = Difference(0, 1, plain_token=20, speculative_token=21)


def view(first=(-0.60, 20), second=(-0.70, 21), later=None):
    """The plain server's view of the output (1, 21, 3)."""
    return [sure(1), scored(21, first, second), later or sure(3)]


def test_equal_outputs_have_no_difference():
    assert compare.differences([(1, 2), (3,)], [[1, 2], [3]]) == []


@pytest.mark.parametrize(
    ("plain", "speculative", "expected"),
    [
        ((1, 20, 3), (1, 21, 3), Difference(0, 1, 20, 21)),
        ((1, 2, 3), (1, 2), Difference(0, 2, 3, None)),
        ((1, 2), (1, 2, 3), Difference(0, 2, None, 3)),
        ((), (5,), Difference(0, 0, None, 5)),
    ],
)
def test_the_first_difference_is_found(plain, speculative, expected):
    assert compare.differences([plain], [speculative]) == [expected]


def test_only_the_differing_requests_are_named():
    found = compare.differences([(1,), (2,), (3,)], [(1,), (9,), (3,)])
    assert [difference.request for difference in found] == [1]


def test_a_close_call_between_the_top_two_is_a_tie():
    verdict = compare.judge(PART, view(), BOUND)
    assert verdict.tie
    assert verdict.gap == pytest.approx(0.1)


def test_the_top_two_may_come_in_either_order():
    assert compare.judge(PART, view((-0.60, 21), (-0.70, 20)), BOUND).tie


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ((-0.10, 20), (-2.40, 21), "nats apart"),
        ((-0.60, 20), (-0.70, 22), "not the tokens chosen"),
        ((-0.60, 22), (-0.70, 21), "not the tokens chosen"),
    ],
)
def test_another_token_for_no_good_reason_is_no_tie(first, second, reason):
    verdict = compare.judge(PART, view(first, second), BOUND)
    assert not verdict.tie
    assert reason in verdict.reason


def test_an_output_that_goes_wrong_after_a_tie_is_no_tie():
    wrong = scored(3, (-0.01, 30), (-6.0, 3))
    verdict = compare.judge(PART, view(later=wrong), BOUND)
    assert not verdict.tie
    assert "after the tie" in verdict.reason
    assert not compare.judge(PART, view(later=scored(3, (-0.6, 30), (-0.9, 31))), BOUND).tie


def test_a_second_tie_after_the_first_is_allowed():
    assert compare.judge(PART, view(later=scored(3, (-0.6, 30), (-0.7, 3))), BOUND).tie


def test_an_output_cut_short_is_no_tie():
    verdict = compare.judge(Difference(0, 3, 4, None), view(), BOUND)
    assert not verdict.tie


def test_where_nothing_may_differ_nothing_is_a_tie():
    assert not compare.unjudged(PART).tie
