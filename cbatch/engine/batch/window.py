"""A bound on the rows between reading and writing, so that memory does not grow with the input."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable

WINDOW_BYTES = 256 * 2**20
"""Most bytes of input lines between reading and writing, unless there is only one line."""


LEAST_PER_SLOT, MOST_PER_SLOT, MANY_ROWS = 4, 16, 2048
"""Rows of a window for each request that runs at once: as many as the second, if they are no more than the last."""


def default_window(max_seqs: int) -> int:
    """Rows that suffice to order the last ones by their work (see `work_order`), and do not take much memory."""
    return max(LEAST_PER_SLOT * max_seqs, min(MOST_PER_SLOT * max_seqs, MANY_ROWS))


class Window:
    """Bounds the rows that are in flight or held back, and the bytes of their lines.

    The reader's thread acquires a place for each row, and the writer's thread releases it. A queue is all that they
    share.

    waited_s: seconds in which the reader waited for a place
    """

    def __init__(self, rows: int, size: int = WINDOW_BYTES) -> None:
        self._rows_left = rows
        self._bytes_left = size
        self._sizes: dict[int, int] = {}
        self._released: queue.SimpleQueue[Iterable[int] | None] = queue.SimpleQueue()
        self.waited_s = 0.0

    def acquire(self, position: int, size: int) -> bool:
        """Waits until there is a place for one more row; a row larger than the window waits until it is alone.

        position: names the row when its place is released
        size:     bytes of its line

        Returns False if the window was closed in the meantime.
        """
        while self._rows_left <= 0 or (self._bytes_left < size and self._sizes):
            if not self._wait():
                return False
        self._sizes[position] = size
        self._rows_left -= 1
        self._bytes_left -= size
        return True

    def release(self, positions: Iterable[int]) -> None:
        self._released.put(positions)

    def close(self) -> None:
        """Ends the wait of `acquire`, now and later."""
        self._released.put(None)

    def _wait(self) -> bool:
        since = time.monotonic()
        positions = self._released.get()
        self.waited_s += time.monotonic() - since
        for position in positions or ():
            self._rows_left += 1
            self._bytes_left += self._sizes.pop(position)
        return positions is not None
