"""Outputs that repeat themselves, and where they are stopped."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cbatch.base.outputs import Sample
from cbatch.schedule.sequence import LOOP_INTERVAL, TokenSequence
from tests.support.queued_requests import encoded


def decoded(tokens: Sequence[int], *, loop_guard: bool = True) -> tuple[int, str | None]:
    """The number of tokens that an output gets, and why it stops."""
    request = encoded([7] * 100, max_tokens=2000, loop_guard=loop_guard)
    request.max_new_tokens = 2000
    sequence = TokenSequence(0, list(request.prompt_ids), request)
    for number, token in enumerate(tokens, 1):
        event = sequence.accept(Sample(token))
        if event.finish_reason is not None:
            return number, event.stop_reason
    return len(tokens), None


@pytest.mark.parametrize("period", [1, 2, 3, 7, 40, 90])
def test_a_loop_ends_an_output(period: int) -> None:
    """Guards the guard: ten repetitions, of 64 tokens, after a beginning of any length; and only if it is asked for."""
    for seed in range(3):
        chance = random.Random(seed)
        beginning = [chance.randrange(1000) for _ in range(chance.randrange(50))]
        repeated = [chance.randrange(1000) for _ in range(period)]
        least = len(beginning) + max(10 * period, 64)
        tokens = beginning + repeated * 100
        number, reason = decoded(tokens)
        assert reason == "loop" and least <= number < least + LOOP_INTERVAL
        assert decoded(tokens[:1500], loop_guard=False) == (min(len(tokens), 1500), None)


def test_what_is_no_loop() -> None:
    """Guards rows of zeros, counting, nine repetitions, and a prompt that repeats itself."""
    chance = random.Random(1)
    verse = [chance.randrange(1000) for _ in range(30)]
    zeros = [5, 0] * 25
    counting = [one for number in range(200) for one in (number, 3, 4)]
    for tokens in ([7] * 40, zeros + verse, counting, verse * 9 + verse[:29], [*verse, 1, *verse, 2] * 5):
        assert decoded([*tokens, *range(2000, 2040)]) == (len(tokens) + 40, None)
