"""Proposes the next tokens of a sequence from what it has said before."""

from __future__ import annotations

from collections.abc import Sequence

from cbatch.engine.speculation.suffix_index import SuffixIndex

MIN_MATCH = 2
"""Tokens at the end of a text that must have occurred before; a single one says little about the next."""

MAX_INDEXED = 4096
"""Tokens that one call of `update` indexes at most, so that a long prompt delays no step by much."""


class Drafter:
    """The index of one sequence."""

    def __init__(self) -> None:
        self._index = SuffixIndex()

    def update(self, token_ids: Sequence[int]) -> bool:
        """Takes in what the sequence has grown by; whether that is all, so that drafts can be made."""
        done = len(self._index)
        for token in token_ids[done : done + MAX_INDEXED]:
            self._index.append(token)
        return len(self._index) == len(token_ids)

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may come next; none if the end of the text has not occurred before."""
        match = self._index.own_match()
        return self._index.after(match, count) if match.length >= MIN_MATCH else []
