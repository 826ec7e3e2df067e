"""How much of the KV cache the running requests will probably need before they end.

Nobody knows how long an output gets. Admitting requests until the cache is full now means preempting them later and
computing them twice. Reserving all that they may ask for leaves most of the cache empty. So the lengths of recent
outputs are taken as likely. From them follows the most blocks that all running requests will hold at any later time, as
some of them end while others grow.
(The future peak: "Past-Future Scheduler", Gong et al., ASPLOS '25, https://arxiv.org/abs/2507.10150.)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

HISTORY = 256
PRIOR = 256
"""Tokens that an output is expected to get while no output has ended yet."""


class Growth(NamedTuple):
    """A running request: tokens that it will still get, and blocks that become free when it ends."""

    tokens: int
    blocks: int


class OutputLengths:
    """The lengths of recent outputs, and how many tokens an output will probably still get."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=HISTORY)
        self._sorted: list[int] = []
        self._sums: list[int] | None = None
        """Of the longest, the two longest, and so on."""

    def add(self, length: int) -> None:
        if len(self._recent) == HISTORY:
            self._sorted.remove(self._recent[0])
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def remaining(self, generated: int, limit: int) -> int:
        """Tokens that an output of `generated` tokens will probably still get, up to `limit` in all.

        By the mean of the recent outputs that were longer; if there are none, as many as it has already.
        """
        longer = len(self._sorted) - bisect_right(self._sorted, generated)
        if longer:
            if self._sums is None:
                self._sums = list(accumulate(reversed(self._sorted)))
            likely = -(-self._sums[longer - 1] // longer) - generated
        else:
            likely = max(generated, PRIOR if not self._sorted else 1)
        return max(min(likely, limit - generated), 0)


def projected_peak(used: int, growing: Sequence[Growth], block_size: int) -> int:
    """Most blocks held at once until all requests have ended, if each step gives each request one token.

    used:    blocks held now
    growing: the running requests, fewest tokens first
    """
    most = used
    freed = 0
    left = len(growing)
    for tokens, blocks in growing:
        held = used + left * -(-tokens // block_size) - freed
        most = held if held > most else most
        freed += blocks
        left -= 1
    return most
