"""What is learnt of how often drafts are right."""

from __future__ import annotations

import random

import pytest

from cbatch.schedule.speculation.acceptance import MOST, AcceptanceRates, kind_of
from cbatch.schedule.speculation.drafter import FORCED


def test_rates_are_learnt_by_length_of_the_match() -> None:
    """Guards the estimate: long matches may be right while short ones are not; the first wrong token ends a draft."""
    rng, rates = random.Random(0), AcceptanceRates()
    for _ in range(2000):
        rates.observe_draft(2, 1, int(rng.random() < 0.3))
        rates.observe_draft(20, 1, int(rng.random() < 0.9))
    assert rates.rate(kind_of(2)) == pytest.approx(0.3, abs=0.15)
    assert rates.rate(kind_of(20)) == pytest.approx(0.9, abs=0.1)
    before = rates.rate(kind_of(FORCED))
    rates.observe_draft(FORCED, 5, 0)
    assert rates.rate(kind_of(FORCED)) < before
    assert kind_of(FORCED) == kind_of(FORCED + 3) > kind_of(10**5)


def test_a_request_backs_off_by_itself_and_begins_with_what_others_had() -> None:
    """Guards one request among others: its own rejections count most, and a new one knows the common rates."""
    common = AcceptanceRates()
    wrong, right = AcceptanceRates(common), AcceptanceRates(common)
    for _ in range(60):
        wrong.observe_draft(5, 1, 0)
        right.observe_draft(5, 1, 1)
    assert wrong.rate(kind_of(5)) < 0.2 and right.rate(kind_of(5)) > 0.8
    assert AcceptanceRates(common).rate(kind_of(5)) == pytest.approx(common.rate(kind_of(5)))
    for _ in range(300):
        wrong.observe_draft(5, 1, 0)
    assert AcceptanceRates(common).rate(kind_of(5)) < 0.1


def test_longer_matches_are_expected_to_be_right_as_often() -> None:
    """Guards quick learning: what short matches were right in is expected of longer ones, until those tell more."""
    common = AcceptanceRates()
    for _ in range(100):
        common.observe(kind_of(1), is_right=True)
    assert all(AcceptanceRates(common).rate(kind_of(length)) > 0.9 for length in (1, 2, 5, 40))
    assert common.rate(kind_of(FORCED)) == AcceptanceRates().rate(kind_of(FORCED)), "a form is no match"
    for _ in range(20):
        common.observe(kind_of(5), is_right=False)
    assert common.rate(kind_of(5)) < 0.2 and common.rate(kind_of(2)) > 0.9
    for _ in range(200):
        common.observe(kind_of(1), is_right=False)
    assert common.rate(kind_of(40)) == AcceptanceRates().rate(kind_of(40))


def test_chances_that_cannot_pay_are_left_out() -> None:
    """Guards the time of a look: of the chances of a draft, those that are at least so much, and nothing else."""
    rates = AcceptanceRates()
    every = rates.chances(1, 20)
    for least in (0.0, every[0], every[4], 1.0):
        assert rates.chances(1, 20, least) == [chance for chance in every if chance >= least]


def test_chances_fall_along_a_draft() -> None:
    """Guards the order in which tokens are drafted: each is less likely than the one before."""
    rates = AcceptanceRates()
    for _ in range(500):
        rates.observe(kind_of(40), is_right=True)
    chances = rates.chances(40, 9)
    assert chances == sorted(chances, reverse=True) and chances[8] == pytest.approx(MOST**9)
