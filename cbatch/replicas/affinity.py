"""Which replicas have served prompts that begin alike, so that prompts with the same beginning share a cache."""

from __future__ import annotations

import re
from collections import OrderedDict

from cbatch.batch.lines import Line

LENGTHS = tuple(512 << doubling for doubling in range(8))
"""Bytes of the beginnings that are compared: some hundred tokens and more. Shorter prompts may go anywhere."""

MAX_BEGINNINGS = 65536

_PROMPT = re.compile(rb'"(?:messages|prompt|prompt_token_ids|system|tools)"\s*:')
"""Where a row says what the prompt begins with; what stands before it, such as an id, differs from row to row."""


def beginnings(line: Line) -> tuple[int, ...]:
    """Hashes of the first bytes of a line's prompt, shortest first; valid in this process."""
    data = line.data
    if data is None or len(data) < LENGTHS[0]:
        return ()
    found = _PROMPT.search(data)
    start = found.end() if found else 0
    return tuple(hash(data[start : start + length]) for length in LENGTHS if start + length <= len(data))


class Affinity:
    """Remembers which replicas have served which beginnings; the least recently used ones are forgotten."""

    def __init__(self, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._max_beginnings = max_beginnings
        self._served: OrderedDict[int, int] = OrderedDict()
        """A bit for each replica that has served the beginning."""

    def is_elsewhere(self, row: tuple[int, ...], number: int) -> bool:
        """Whether other replicas have served more of this row's beginning than this one."""
        for beginning in reversed(row):
            if served := self._served.get(beginning):
                return not served >> number & 1
        return False

    def note(self, row: tuple[int, ...], number: int) -> None:
        """The replica gets a row with these beginnings."""
        for beginning in row:
            self._served[beginning] = self._served.get(beginning, 0) | 1 << number
            self._served.move_to_end(beginning)
        while len(self._served) > self._max_beginnings:
            self._served.popitem(last=False)

    def forget(self, number: int) -> None:
        """The replica has died, and its cache with it."""
        for beginning in self._served:
            self._served[beginning] &= ~(1 << number)
