"""Proposes the next tokens of a sequence from what it has said before, and from what others have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbatch.schedule.speculation.finished_outputs import FinishedOutputs
from cbatch.schedule.speculation.suffix_index import Match, SuffixIndex

MIN_MATCH = 2
"""Tokens at the end of a text that must have occurred before, by default; a single one says little about the next."""

FORCED = 1_000_000
"""Stands for the length of a match if a form forces the tokens."""

LOOK_BACK = 8
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
        self._matches: list[Match] = []
        """In each index of finished outputs, the match of the first `_num_matched` tokens of the sequence."""
        self._num_matched = self._num_begun = 0

    def __len__(self) -> int:
        """Tokens that are indexed."""
        return len(self._index)

    def update(self, token_ids: Sequence[int], most: int) -> int:
        """Takes in what the sequence has grown by, at most so many tokens. Returns how many."""
        done = len(self._index)
        new = token_ids[done : done + most]
        self._index.extend(new)
        return len(new)

    def propose(self, count: int, least: int = MIN_MATCH) -> Proposal | None:
        """At most `count` tokens that may come next; None if the last `least` tokens have not occurred before.

        Of several texts, that with the longest match says them, the own one first.
        """
        best, where = self._index.own_match(), self._index
        if self._finished is not None and len(self._finished.indexes[0]):
            self._match_others(self._finished)
            for number, match in enumerate(self._matches):
                if match.length > best.length:
                    best, where = match, self._finished.indexes[number]
        if best.length < least:
            return None
        tokens = where.after(best, count)
        return Proposal(tokens, best.length) if tokens else None

    def _match_others(self, finished: FinishedOutputs) -> None:
        """Finds the end of the sequence in the indexes of finished outputs."""
        own = self._index.tokens
        if self._num_begun != finished.num_begun or len(own) - self._num_matched > LOOK_BACK:
            self._num_begun = finished.num_begun
            self._num_matched = max(len(own) - LOOK_BACK, 0)
            self._matches = [Match()] * len(finished.indexes)
        new = own[self._num_matched :]
        for number, index in enumerate(finished.indexes):
            match = self._matches[number]
            for token in new:
                match = index.advanced(match, token)
            self._matches[number] = match
        self._num_matched = len(own)
