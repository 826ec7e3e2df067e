"""A bound on the rows between reading and writing, so that memory does not grow with the input."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable

WINDOW_BYTES = 256 * 2**20
"""Most bytes of memory for the rows between reading and writing, unless there is only one row."""

BYTES_PER_ROW, BYTES_PER_OBJECT, BYTES_PER_LIST, BYTES_PER_VALUE = 5000, 500, 100, 60
"""Memory of a row, and of what its JSON holds, with the copies of messages that templates get."""

BYTES_PER_TOKEN, BYTES_PER_SCORE = 40, 200
"""Memory of a token of a prompt, and of a log-probability of one."""

LEAST_PER_SLOT, MOST_PER_SLOT, MANY_ROWS = 4, 16, 2048
"""Rows of a window for each request that runs at once: as many as the second, if they are no more than the last."""


def default_window(max_seqs: int) -> int:
    """Rows that suffice to order the last ones by their work (see `work_order`), and do not take much memory."""
    return max(LEAST_PER_SLOT * max_seqs, min(MOST_PER_SLOT * max_seqs, MANY_ROWS))


def weight_of(data: bytes | None) -> int:
    """About how many bytes of memory a line takes once it is read, without the tokens of its prompt."""
    if data is None:
        return BYTES_PER_ROW
    return (
        BYTES_PER_ROW
        + (3 if data.isascii() else 5) * len(data)
        + BYTES_PER_OBJECT * data.count(b"{")
        + BYTES_PER_LIST * data.count(b"[")
        + BYTES_PER_VALUE * (data.count(b",") + data.count(b":"))
    )


class Window:
    """Bounds the rows that are in flight or held back, and the bytes of memory that they take.

    The reader's thread acquires a place for each row, and the writer's thread releases it. A queue is all that they
    share.

    waited_s: seconds in which the reader waited for a place
    """

    def __init__(self, rows: int, size: int) -> None:
        self._rows_left = rows
        self._bytes_left = size
        self._sizes: dict[int, int] = {}
        self._released: queue.SimpleQueue[Iterable[int] | None] = queue.SimpleQueue()
        self.waited_s = 0.0

    def acquire(self, position: int, size: int) -> bool:
        """Waits until there is a place for one more row; a row larger than the window waits until it is alone.

        position: names the row when its place is released
        size:     bytes of memory that it will take

        Returns False if the window was closed in the meantime.
        """
        while self._rows_left <= 0 or (self._bytes_left < size and self._sizes):
            if not self._wait():
                return False
        self._sizes[position] = size
        self._rows_left -= 1
        self._bytes_left -= size
        return True

    def settle(self, position: int, size: int) -> None:
        """Tells what the latest row really takes. Called by the reader's thread."""
        self._bytes_left += self._sizes[position] - size
        self._sizes[position] = size

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
