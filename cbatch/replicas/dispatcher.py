"""Which replica gets which rows. Only bookkeeping: no threads, no clock, nothing is sent.

A row waits or is in the hands of replicas until somebody finishes it; the first answer counts. Each death of a replica
counts against all rows in its hands, any of which may be the reason. They are the next to be given out again, only a
few of them to each replica: so the next death shows which few to look at. Those run alone, so that no other row dies
with them; what was there at three deaths fails.

Prompts that begin alike go to the same replica, since they share a cache there.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from cbatch.batch.lines import Line
from cbatch.batch.row import Row
from cbatch.replicas.connection import MAX_MESSAGE_BYTES

LENGTHS = tuple(512 << doubling for doubling in range(8))
"""Bytes of the beginnings that are compared: some hundred tokens and more. Shorter prompts may go anywhere."""

MAX_BEGINNINGS = 65536

_PROMPT = re.compile(rb'"(?:messages|prompt|prompt_token_ids|system|tools)"\s*:')
"""Where a row says what the prompt begins with; what stands before it, such as an id, differs from row to row."""

DEATHS_TO_RUN_ALONE = 2
MAX_DEATHS = 3
FAILED = f"The row was not finished: the replicas that ran it died {MAX_DEATHS} times."

SLOTS_PER_SUSPECT = 8
"""A replica gets one row that was there at a death for so many rows that it computes at once."""

LOOKAHEAD = 256
"""Rows in the queue that may be passed over for one that begins like earlier ones of a replica."""


@dataclass(slots=True, eq=False)
class _Hand:
    """The state of one life of a replica.

    slots:     rows that it computes at once
    rows:      indices of its rows
    cancelled: indices of rows that others have finished, which it has not been told yet
    """

    slots: int
    rows: set[int] = field(default_factory=set)
    cancelled: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Rows that it can still be given. As many as it computes wait there, so that no slot stays free."""
        return 2 * self.slots - len(self.rows)

    @property
    def max_suspects(self) -> int:
        """Rows that were there at a death and may be among its rows."""
        return max(self.slots // SLOTS_PER_SUSPECT, 1)


@dataclass(frozen=True, slots=True)
class Work:
    """The next task of a replica.

    rows:       to compute, or to write off, as they say themselves; `num_copies` of them are in the hands of others too
    cancelled:  indices of rows not to go on with
    """

    rows: list[Line]
    cancelled: list[int]
    num_copies: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.cancelled)


class Dispatcher:
    """Gives the rows of a batch to replicas, which are known by their numbers."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._queue: OrderedDict[int, Row] = OrderedDict()
        self._suspects: deque[Row] = deque()
        """Rows that were there at a death, and go out again before the queue."""
        self._alone: deque[Row] = deque()
        self._failed: deque[Row] = deque()
        self._hands: dict[int, _Hand] = {}
        self._draining: int | None = None
        """The replica that gets nothing until it is empty, so that it can run a row alone."""
        self._affinity = Affinity()
        self._input_has_ended = False

    def add(self, row: Row) -> None:
        """A row was read; its `beginnings` count."""
        row.holders = []
        self._rows[row.index] = self._queue[row.index] = row

    def end_input(self) -> None:
        """No more rows will come."""
        self._input_has_ended = True

    def join(self, number: int, slots: int) -> None:
        """A new life of a replica begins. It computes so many rows at once."""
        self._hands[number] = _Hand(slots)

    def leave(self, number: int) -> None:
        """A replica has died, with all rows in its hands."""
        hand = self._hands.pop(number)
        if self._draining == number:
            self._draining = None
        self._affinity.forget(number)
        rows = [self._rows[index] for index in hand.rows]
        for row in rows:
            row.holders.remove(number)
            row.deaths += 1
        for row in sorted(rows, key=lambda row: row.position, reverse=True):
            if row.holders:
                continue
            if row.deaths >= MAX_DEATHS:
                self._failed.appendleft(row)
            elif row.deaths >= DEATHS_TO_RUN_ALONE:
                self._alone.appendleft(row)
            else:
                self._suspects.appendleft(row)

    def take(self, number: int) -> Work:
        """The next task of the replica; the rows are in its hands now."""
        hand = self._hands[number]
        cancelled, hand.cancelled = hand.cancelled, []
        rows = [self._failed.popleft() for _ in range(min(len(self._failed), hand.slots))]
        lines = [replace(row.line, failure=FAILED) for row in rows]
        if not rows:  # whatever killed three may kill once more
            rows = self._choose(number, hand)
            lines = [row.line for row in rows]
        num_copies = sum(bool(row.holders) for row in rows)
        for row in rows:
            row.holders.append(number)
            hand.rows.add(row.index)
        return Work(lines, cancelled, num_copies)

    def finish(self, number: int, index: int) -> Row | None:
        """A replica has answered for a row. Returns the row; None if somebody has answered before."""
        row = self._rows.pop(index, None)
        if row is None:
            return None
        if not row.holders and self._queue.pop(index, None) is None:  # an answer from a life that was given up
            next(rows for rows in (self._suspects, self._alone, self._failed) if row in rows).remove(row)
        for holder in row.holders:
            hand = self._hands[holder]
            hand.rows.remove(index)
            if holder != number:
                hand.cancelled.append(index)
        return row

    def num_held(self, number: int) -> int:
        return len(self._hands[number].rows)

    def runs_alone(self, number: int) -> bool:
        """Whether a replica has a row that may have nothing beside it."""
        rows = self._hands[number].rows
        return len(rows) == 1 and self._rows[next(iter(rows))].deaths >= DEATHS_TO_RUN_ALONE

    def is_starving(self, number: int) -> bool:
        """Whether the replica would take a row that may still be read."""
        return not self._input_has_ended and not self._queue and self._hands[number].room > 0

    def _choose(self, number: int, hand: _Hand) -> list[Row]:
        if self.runs_alone(number):
            return []
        if self._alone:
            if not hand.rows:
                self._draining = None
                return [self._alone.popleft()]
            if self._draining in (None, number):
                self._draining = number
                return []
        chosen: list[Row] = []
        if self._suspects:
            num_held = sum(self._rows[index].deaths > 0 for index in hand.rows)
            most = max(min(hand.max_suspects - num_held, hand.room), 0)
            chosen = [self._suspects.popleft() for _ in list(_within_bytes(islice(self._suspects, most)))]
        if self._queue:
            chosen += self._from_queue(number, hand, chosen)
        elif self._input_has_ended and not (hand.rows or chosen):
            chosen = self._copies(hand)
        return chosen

    def _from_queue(self, number: int, hand: _Hand, before: list[Row]) -> list[Row]:
        """The first rows of the queue; those that begin like rows of other replicas only for slots that are free.

        before: rows that it gets, too
        """
        most = max(self._share(hand) - len(before), 0)
        chosen: list[Row] = []
        others: list[Row] = []
        for row in islice(self._queue.values(), most + LOOKAHEAD):
            if len(chosen) == most:
                break
            if self._affinity.is_elsewhere(row.beginnings, number):
                others.append(row)
            else:
                self._affinity.note(row.beginnings, number)
                chosen.append(row)
        for row in others:
            if len(chosen) == most:
                break
            if len(chosen) < hand.slots - len(hand.rows) or not self._affinity.is_elsewhere(row.beginnings, number):
                self._affinity.note(row.beginnings, number)
                chosen.append(row)
        chosen = list(_within_bytes([*before, *chosen]))[len(before) :]
        for row in chosen:
            del self._queue[row.index]
        return chosen

    def _share(self, hand: _Hand) -> int:
        """How many rows of the queue a replica may have: the last ones are spread over all."""
        room = sum(other.room for other in self._hands.values())
        if len(self._queue) >= room:
            return hand.room
        slots = sum(one.slots for one in self._hands.values())
        fair = -(-(2 * slots - room + len(self._queue)) * hand.slots // slots) - len(hand.rows)
        return min(max(fair, int(len(hand.rows) < hand.slots)), hand.room)

    def _copies(self, hand: _Hand) -> list[Row]:
        """Rows that others have, for a replica with nothing to do.

        Those given last come first: a replica has most likely not begun them, and is nearly done with its oldest.
        Never what was there at a death, so that it cannot take two replicas with it.
        """
        rows = (row for row in reversed(self._rows.values()) if len(row.holders) == 1 and not row.deaths)
        return list(_within_bytes(islice(rows, hand.slots)))


def _within_bytes(rows: Iterable[Row]) -> Iterator[Row]:
    total = 0
    for row in rows:
        size = len(row.line.data or b"")
        if total and total + size > MAX_MESSAGE_BYTES:
            return
        total += size
        yield row


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

    def __init__(self) -> None:
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
        while len(self._served) > MAX_BEGINNINGS:
            self._served.popitem(last=False)

    def forget(self, number: int) -> None:
        """The replica has died, and its cache with it."""
        for beginning in self._served:
            self._served[beginning] &= ~(1 << number)
