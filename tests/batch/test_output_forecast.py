"""What is expected of outputs, by the outputs before them."""

from __future__ import annotations

import pytest

from cbatch.batch.feed import LEAST_SAMPLES, OutputForecast, ends_by_limit, output_limit
from cbatch.schedule.forecast import PRIOR
from cbatch.schedule.limits import SequenceLimits
from tests.support.queued_requests import encoded


def test_kinds_of_rows_are_told_apart() -> None:
    """Guards a file of labels and essays: the many short outputs say nothing about the long ones."""
    forecast, label, essay = OutputForecast(), encoded(30), encoded(30)
    assert forecast.remaining(label, 10) == 10 and forecast.remaining(essay, 1000) == PRIOR
    for _ in range(LEAST_SAMPLES):
        forecast.observe(label, 10, 3)
    assert forecast.remaining(label, 10) == 3 and forecast.remaining(essay, 1000) == PRIOR
    for length in (400, 600) * (LEAST_SAMPLES // 2):
        forecast.observe(essay, 1000, length)
    assert forecast.remaining(essay, 1000) == 500 and forecast.remaining(essay, 1000, 450) == 150
    assert forecast.remaining(label, 10, 2) == 1


def test_prompts_tell_if_outputs_follow_them() -> None:
    """Guards translations and the like, whose outputs are as long as their prompts; the others share what is known."""
    forecast = OutputForecast()
    for size in (20, 200) * LEAST_SAMPLES:
        forecast.observe(encoded(size), 500, size)
    assert [forecast.remaining(encoded(size), 500) for size in (17, 250, 2000)] == [20, 200, 110]


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, True), ({"stop": "x"}, False), ({"stop_token_ids": 3}, False), ({"regex": "a+"}, False)],
)
def test_outputs_that_only_their_limit_ends(params: dict[str, object], expected: bool) -> None:
    """Guards exact knowledge against what other rows do."""
    request = encoded(ignore_eos=True, **params)
    assert ends_by_limit(request.params) is expected and not ends_by_limit(encoded(**params).params)
    forecast = OutputForecast()
    for _ in range(LEAST_SAMPLES):
        forecast.observe(request, 100, 7)
    assert forecast.remaining(request, 100, 5) == (95 if expected else 2)


def test_limits_follow_context_and_cache() -> None:
    """Guards the limit of rows that ask for the rest of the context, and of prompts that are too long."""
    limits = SequenceLimits(context=100, cache=90)
    sizes = ((30, 20), (30, 500), (30, None), (95, 20))
    assert [output_limit(limits, encoded(size, max_tokens=most)) for size, most in sizes] == [20, 60, 60, 0]
