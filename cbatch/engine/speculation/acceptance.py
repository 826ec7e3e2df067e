"""How often drafted tokens are right, by the length of the match that they come from.

It is learnt without a draft, too: what a text would have drafted is compared with the token that came.
"""

from __future__ import annotations

from bisect import bisect_right

from cbatch.engine.speculation.drafter import FORCED

MATCH_LENGTHS = (2, 3, 4, 6, 9, 17, 33, FORCED)
"""The shortest matches of each kind but the first."""

PRIOR = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.8)
"""How often a token of each kind is right, before any was seen."""

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
    """Rates by kind of match: of all requests, or of one, which begins with those of all."""

    def __init__(self, common: AcceptanceRates | None = None) -> None:
        self._common = common
        self._memory = COMMON_MEMORY if common is None else OWN_MEMORY
        self._right = [0.0] * len(PRIOR)
        self._seen = [0.0] * len(PRIOR)

    def rate(self, kind: int) -> float:
        """The share of tokens of this kind that are right, if all before them were."""
        expected = PRIOR[kind] if self._common is None else self._common.rate(kind)
        return (self._right[kind] + PRIOR_WEIGHT * expected) / (self._seen[kind] + PRIOR_WEIGHT)

    def observe(self, kind: int, *, is_right: bool) -> None:
        """Learns from one token, all before which were right."""
        self._right[kind] = self._memory * self._right[kind] + is_right
        self._seen[kind] = self._memory * self._seen[kind] + 1
        if self._common is not None:
            self._common.observe(kind, is_right=is_right)

    def observe_draft(self, matched: int, drafted: int, accepted: int) -> None:
        """Learns from a draft: the tokens after the first wrong one say nothing."""
        for place in range(min(accepted + 1, drafted)):
            self.observe(kind_of(matched + place), is_right=place < accepted)

    def chances(self, matched: int, count: int) -> list[float]:
        """For each of `count` drafted tokens, how likely it is that it is accepted."""
        chance, found = 1.0, []
        for place in range(count):
            chance *= min(self.rate(kind_of(matched + place)), MOST)
            found.append(chance)
        return found
