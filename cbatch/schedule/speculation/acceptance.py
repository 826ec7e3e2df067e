"""How often drafted tokens are right, by the length of the match that they come from.

It is learnt without a draft, too: what a text would have drafted is compared with the token that came.
"""

from __future__ import annotations

from bisect import bisect_right

from cbatch.schedule.speculation.drafter import FORCED

MATCH_LENGTHS = (2, 3, 4, 6, 9, 17, 33, FORCED)
"""The shortest matches of each kind but the first."""

PRIOR = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.8)
"""How often a token of each kind is right, before any was seen."""

FORCED_KIND = len(PRIOR) - 1

PRIOR_WEIGHT = 4
"""As many tokens count as seen before the first one."""

OWN_MEMORY, COMMON_MEMORY = 0.9, 0.99
"""What of the tokens seen so far still counts after one more: of a request, and of all requests."""

MOST = 0.98
"""The highest rate that is believed."""


def kind_of(matched: int) -> int:
    """The kind of a match of so many tokens."""
    return bisect_right(MATCH_LENGTHS, matched)


class AcceptanceRates:
    """Rates by kind of match: of all requests, or of one, which begins with those of all.

    Until much is seen of a kind, the rate of all requests is that of the next shorter matches, if that is more than
    before any was seen: the longer a match, the more often it is right.
    """

    def __init__(self, common: AcceptanceRates | None = None) -> None:
        self._common = common
        self._memory = COMMON_MEMORY if common is None else OWN_MEMORY
        self._right = [0.0] * len(PRIOR)
        self._seen = [0.0] * len(PRIOR)
        self._rates: list[float] = list(PRIOR)
        """Of all requests; unused for one."""
        self._expected: list[float] = list(PRIOR) if common is None else common._rates
        """Rates that count as seen before the first token."""

    def rate(self, kind: int) -> float:
        """The share of tokens of this kind that are right, if all before them were."""
        return (self._right[kind] + PRIOR_WEIGHT * self._expected[kind]) / (self._seen[kind] + PRIOR_WEIGHT)

    def observe(self, kind: int, *, is_right: bool) -> None:
        """Learns from one token, all before which were right."""
        self._right[kind] = self._memory * self._right[kind] + is_right
        self._seen[kind] = self._memory * self._seen[kind] + 1
        if self._common is not None:
            self._common.observe(kind, is_right=is_right)
        else:
            self._update_rates(kind)

    def _update_rates(self, kind: int) -> None:
        """After an observation of this kind, whose rate longer matches are expected to have at least."""
        self._rates[kind] = self.rate(kind)
        for longer in range(kind + 1, FORCED_KIND):
            expected = max(PRIOR[longer], self._rates[longer - 1])
            if expected == self._expected[longer]:
                return
            self._expected[longer] = expected
            self._rates[longer] = self.rate(longer)

    def observe_draft(self, matched: int, drafted: int, accepted: int) -> None:
        """Learns from a draft: the tokens after the first wrong one say nothing."""
        for place in range(min(accepted + 1, drafted)):
            self.observe(kind_of(matched + place), is_right=place < accepted)

    def chances(self, matched: int, count: int, least: float = 0.0) -> list[float]:
        """For each of `count` drafted tokens, how likely it is that it is accepted, as long as that is `least`."""
        chance, found, kind, rate = 1.0, list[float](), -1, 0.0
        for length in range(matched, matched + count):
            if kind != (kind := kind_of(length)):
                rate = min(self.rate(kind), MOST)
            chance *= rate
            if chance < least:
                break
            found.append(chance)
        return found
