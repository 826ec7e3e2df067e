"""How long outputs get, told from a trial in which only some of them have ended.

There are three answers: likely, each token is as likely to be the last one as it was in the trial; at least, what goes
on ends at once; at most, it goes on to its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbatch.cli.run.estimate.sample_run import TriedOutput


class Span(NamedTuple):
    """Least, likely and most."""

    least: float
    likely: float
    most: float

    def rounded(self) -> dict[str, float]:
        return {name: round(value) if value >= 100 else round(value, 1) for name, value in self._asdict().items()}

    def words(self, form: Callable[[float], str]) -> str:
        """Like `2 hours (1 hour to 4 hours)`."""
        least, likely, most = map(form, self)
        return f"{likely} ({least} to {most})" if least != most else likely


@dataclass(frozen=True, slots=True)
class EndChances:
    """How likely each token of an output is its last one, if not only its limit ends it: high, likely and low."""

    high: float
    likely: float
    low: float

    @classmethod
    def of(cls, outputs: Sequence[TriedOutput]) -> EndChances:
        """`outputs`: those of a trial that have begun"""
        free = [one for one in outputs if not one.ends_by_limit]
        tokens, stops = sum(one.tokens for one in free), sum(one.was_stopped for one in free)
        if not tokens:
            return cls(1.0, 0.0, 0.0)
        going = [one for one in free if not one.has_ended]
        to_limits = sum(one.limit - one.tokens for one in going)
        most = stops + len(going)
        return cls(
            high=min((most + 2 * math.sqrt(most)) / tokens, 1.0),
            likely=stops / tokens,
            low=max(stops - 2 * math.sqrt(stops), 0.0) / (tokens + to_limits),
        )


def expected_length(limit: int, chance: float) -> float:
    """The mean length of outputs of at most `limit` tokens, if each token is the last one with this chance."""
    return (1 - (1 - chance) ** limit) / chance if chance > 0 else float(limit)


def length_of(output: TriedOutput, chances: EndChances) -> Span:
    """How long an output of the trial gets. One that goes on is like a new one from where it is."""
    if output.has_ended:
        return Span(output.tokens, output.tokens, output.tokens)
    if output.ends_by_limit:
        return Span(output.limit, output.limit, output.limit)
    left = output.limit - output.tokens
    least = 0.0 if output.tokens else expected_length(left, chances.high)
    most = float(left) if output.tokens else expected_length(left, chances.low)
    likely = min(max(expected_length(left, chances.likely), least), most)
    return Span(*(output.tokens + more for more in (least, likely, most)))
