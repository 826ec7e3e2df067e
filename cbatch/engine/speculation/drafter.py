"""Proposes the next tokens of a sequence from what it has said before, and from what others have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbatch.engine.speculation.finished_outputs import FinishedOutputs
from cbatch.engine.speculation.suffix_index import Match, SuffixIndex

MIN_MATCH = 2
"""Tokens at the end of a text that must have occurred before; a single one says little about the next."""

FORCED = 1_000_000
"""Stands for the length of a match if a form forces the tokens."""

LOOK_BACK = 32
"""Tokens at the end of a text that are looked for in an index of other texts that is new to it."""


class Proposal(NamedTuple):
    """Tokens that may come next.

    matched: tokens at the end of the text that occurred where these followed, or `FORCED`
    """

    tokens: list[int]
    matched: int


class Drafter:
    """The index of one sequence, and where its end occurs in those of finished outputs."""

    def __init__(self, finished: FinishedOutputs | None = None) -> None:
        self._index = SuffixIndex()
        self._finished = finished
        self._matches: list[tuple[SuffixIndex, int, Match]] = []
        """In each index of finished outputs, the match of the first so many tokens of the sequence."""

    def __len__(self) -> int:
        """Tokens that are indexed."""
        return len(self._index)

    def update(self, token_ids: Sequence[int], most: int) -> int:
        """Takes in what the sequence has grown by, at most so many tokens. Returns how many."""
        done, append = len(self._index), self._index.append
        new = token_ids[done : done + most]
        for token in new:
            append(token)
        return len(new)

    def propose(self, count: int) -> Proposal | None:
        """At most `count` tokens that may come next; None if the end of the text has not occurred before.

        Of several texts, that with the longest match says them, the own one first.
        """
        best, where = self._index.own_match(), self._index
        if self._finished is not None:
            for index, match in self._advanced(self._finished.indexes):
                if match.length > best.length:
                    best, where = match, index
        tokens = where.after(best, count) if best.length >= MIN_MATCH else []
        return Proposal(tokens, best.length) if tokens else None

    def _advanced(self, indexes: Sequence[SuffixIndex]) -> list[tuple[SuffixIndex, Match]]:
        """The matches of the whole sequence in other indexes."""
        own, known = self._index.tokens, {id(index): (seen, match) for index, seen, match in self._matches}
        self._matches = []
        for index in indexes:
            seen, match = known.get(id(index), (0, Match()))
            if len(own) - seen > LOOK_BACK:
                seen, match = len(own) - LOOK_BACK, Match()
            for token in own[seen:]:
                match = index.advanced(match, token)
            self._matches.append((index, len(own), match))
        return [(index, match) for index, _, match in self._matches]
