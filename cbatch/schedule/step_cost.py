"""The cost of one more token in a step without prompts, learnt from the steps themselves.

Near the number of tokens that steps have, time is nearly a line: the weights are read whatever the tokens are, and each
token adds its part. The height of the line follows recent steps, which get slower as texts get longer. Its slope is
learnt when steps differ in their tokens, and fades towards a low guess while they do not, so that what was too dear
once is tried again. It is trusted only near the steps that have told it: drafts begin small, and may double.
"""

from __future__ import annotations

from collections.abc import Sequence

LEVEL_RATE, SLOPE_RATE, FADE = 1 / 8, 1 / 5, 1 / 300
"""What one step changes: the height of the line, its slope, and the slope of steps that tell nothing of it."""

FIRST_GUESS, LOWEST_GUESS = 0.03, 0.3
"""Of a token's unknown cost: this share of the step's time, or of an equal part of each token if that is less."""

MAX_SURPRISE = 1.0
"""Times of the usual step by which one counts as slower or faster than expected, at most."""

LEAST_REACH = 2.0
"""Tokens beside those of recent steps for which the line is trusted in any case."""

MIN_GAIN = 1.02
"""Tokens per second with drafts over those without, below which nothing is drafted."""

WORTH_LOOKING = 0.8
"""The share of a step's time that its tokens may cost, so that it is worth the host's time to look for drafts."""


class StepCost:
    """Predicts the time of a step by its number of tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        """The point on the line around which recent steps were."""
        self._slope = 0.0
        self._num_told = 0
        self._reach = LEAST_REACH
        """Most tokens that a recent step had more than others."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from a step without prompts."""
        if self._seconds == 0:
            self._tokens, self._seconds = float(tokens), seconds
            self._slope = self._guess
            return
        surprise = seconds - self.seconds(tokens)
        most = MAX_SURPRISE * self._seconds
        surprise = min(max(surprise, -most), most)
        further = tokens - self._tokens
        self._reach = max(self._reach - FADE * self._reach, further, LEAST_REACH)
        if abs(further) >= 0.5:
            self._num_told += 1
            rate = max(SLOPE_RATE, 1 / (1 + self._num_told))
            self._slope = max(self._slope + rate * surprise * further / (further * further + 1), 0.0)
        else:
            self._slope += FADE * (self._guess - self._slope)
        self._seconds += LEVEL_RATE * (surprise + self._slope * further)
        self._tokens += LEVEL_RATE * further

    @property
    def _guess(self) -> float:
        return self._seconds * min(FIRST_GUESS, LOWEST_GUESS / self._tokens)

    @property
    def is_known(self) -> bool:
        """Whether a step was observed."""
        return self._seconds > 0

    @property
    def reach(self) -> int:
        """Most tokens beside those of recent steps for which predictions are trusted: twice what was seen."""
        return int(2 * self._reach)

    def seconds(self, tokens: float) -> float:
        """The time that a step of so many tokens will probably take."""
        return max(self._seconds + self._slope * (tokens - self._tokens), self._seconds / 8)

    def is_worth_looking(self, tokens: float | None = None) -> bool:
        """Whether drafts could pay in a step of so many tokens, by default as many as recent steps had.

        They cannot if a token costs nearly its part of the step.
        """
        tokens = self._tokens if tokens is None else tokens
        return self.is_known and self._slope * tokens < WORTH_LOOKING * self.seconds(tokens)

    def least_chance(self, tokens: float, weight: float = 1) -> float:
        """The chance of being accepted below which no drafted token pays in a step of so many others."""
        return weight * self._slope * tokens / self.seconds(tokens) if self.is_known else 0.0

    def num_worth(self, tokens: int, chances: Sequence[float], weight: float = 1) -> tuple[int, float]:
        """How many of these drafted tokens give the most tokens per second in a step of so many others.

        Returns the seconds that they save, too.

        chances: of each to be accepted, falling
        weight:  times that a drafted token is computed
        """
        if not chances:
            return 0, 0.0
        seconds, more = self.seconds(tokens), weight * self._slope
        plain, expected = tokens / seconds, float(tokens)
        best, count, saved = MIN_GAIN * plain, 0, 0.0
        for number, chance in enumerate(chances[: self.reach], 1):
            expected += chance
            seconds += more
            if expected > best * seconds:
                best, count, saved = expected / seconds, number, expected / plain - seconds
        return count, saved
