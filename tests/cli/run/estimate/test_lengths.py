"""How long outputs get, by those of a trial: the range must hold what is true."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from cbatch.cli.run.estimate.lengths import EndChances, Span, expected_length, length_of
from cbatch.cli.run.estimate.sample_run import TriedOutput


def tried(tokens: int, limit: int, *, ended: bool, ends_by_limit: bool = False) -> TriedOutput:
    return TriedOutput(0, limit, ends_by_limit, tokens, ended)


def test_the_mean_of_outputs_that_end_by_chance() -> None:
    """Guards the formula, against outputs that were drawn."""
    source = random.Random(0)
    for chance, limit in ((0.1, 1000), (0.1, 7), (0.02, 50)):
        drawn = [next((n for n in range(1, limit) if source.random() < chance), limit) for _ in range(20_000)]
        assert expected_length(limit, chance) == pytest.approx(fmean(drawn), rel=0.03)
    assert expected_length(40, 0.0) == 40 and expected_length(0, 0.5) == 0 and expected_length(40, 1.0) == 1


def test_what_has_ended_is_known_and_what_goes_on_has_a_range() -> None:
    """Guards against ranges around what is known, and against a single number for what is not."""
    outputs = [tried(20, 100, ended=True), tried(60, 60, ended=True), tried(20, 100, ended=False)]
    chances = EndChances.of(outputs)
    assert chances.likely == pytest.approx(1 / 100) and chances.low == 0  # one stop tells too little
    assert length_of(outputs[0], chances) == (20, 20, 20)
    span = length_of(outputs[2], chances)
    assert span.least == 20 and span.most == 100 and 60 < span.likely < 80
    fixed = tried(5, 80, ended=False, ends_by_limit=True)
    assert length_of(fixed, chances) == (80, 80, 80)
    waiting = length_of(tried(0, 100, ended=False), chances)
    assert 1 <= waiting.least < waiting.likely < waiting.most == 100


def test_outputs_that_only_their_limit_ends_say_nothing_of_others() -> None:
    """Guards a file in which some rows ignore end tokens: their tokens are no chance to end."""
    fixed = [tried(500, 500, ended=True, ends_by_limit=True)] * 5
    free = [tried(10, 100, ended=True)] * 5
    assert EndChances.of([*fixed, *free]) == EndChances.of(free)
    assert EndChances.of(fixed) == EndChances(1.0, 0.0, 0.0)


@pytest.mark.parametrize(("chance", "limit"), [(0.02, 400), (0.005, 300), (0.3, 50)])
def test_the_range_holds_the_truth_and_the_likely_value_is_near(chance: float, limit: int) -> None:
    """Guards trials that are cut off: the outputs that have ended by then are the short ones."""
    source, held = random.Random(1), 0
    ended: list[int] = []
    every: list[int] = []
    for _ in range(40):
        real = [next((n for n in range(1, limit) if source.random() < chance), limit) for _ in range(64)]
        cut = [tried(min(length, 60), limit, ended=length <= 60) for length in real]
        spans = [length_of(one, EndChances.of(cut)) for one in cut]
        least, likely, most = (sum(span[case] for span in spans) for case in range(3))
        assert least <= sum(real) <= most and least <= likely <= most
        held += sum(real) / 1.5 < likely < sum(real) * 1.5
        ended += [one.tokens for one in cut if one.has_ended]
        every += real
    assert held >= 34
    assert chance == 0.3 or fmean(ended) < 0.6 * fmean(every)  # which would be the answer of the ended ones alone


def test_ranges_in_words_and_rounded() -> None:
    """Guards against a range where there is none, and against digits that nobody knows."""
    assert Span(1, 2, 4).words(str) == "2 (1 to 4)" and Span(3, 3, 3).words(str) == "3"
    assert Span(1.234, 99.96, 1234.5).rounded() == {"least": 1.2, "likely": 100.0, "most": 1234}
