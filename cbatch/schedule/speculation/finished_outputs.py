"""Outputs that are finished, in which later requests find drafts: templated rows, second turns of a chat.

Their memory is bounded: two indexes of so many tokens each. New outputs go into the younger one; when that is full, the
older one is dropped as a whole, and another begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cbatch.schedule.speculation.suffix_index import END, SuffixIndex

CAPACITY = 2**15
"""Tokens of one of the two indexes: about 8 MB."""


class FinishedOutputs:
    """The indexes of finished outputs. An output is added at once, and indexed a bounded number of tokens at a time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._to_index: deque[int] = deque(maxlen=capacity)
        """Tokens that are not indexed yet; the oldest go if they are too many."""
        self.indexes = [SuffixIndex()]
        """The one that grows, and the full one before it, if there is any."""
        self.num_begun = 1
        """Indexes that were begun so far."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds an output."""
        self._to_index += token_ids
        self._to_index.append(END)

    def update(self, most: int) -> int:
        """Indexes at most so many tokens of the outputs that were added. Returns how many."""
        count = left = min(most, len(self._to_index))
        while left:
            if len(self.indexes[0]) >= self._capacity:
                self.indexes = [SuffixIndex(), self.indexes[0]]
                self.num_begun += 1
            part = min(left, self._capacity - len(self.indexes[0]))
            self.indexes[0].extend([self._to_index.popleft() for _ in range(part)])
            left -= part
        return count
