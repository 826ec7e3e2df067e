"""The interface of drivers of a batch: an engine of this process (`engine_driver.py`), or replicas in others.

Nothing here imports torch: the process that drives replicas needs none.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.engine.stats import EngineStats
from cbatch.schedule.limits import EngineLimits

WINDOW_BYTES = 256 * 2**20
"""Most bytes of memory for the rows between reading and writing, unless there is only one row."""

BYTES_PER_ROW, BYTES_PER_OBJECT, BYTES_PER_LIST, BYTES_PER_VALUE = 5000, 500, 100, 60
"""Memory of a row, and of what its JSON holds, with the copies of messages that templates get."""

BYTES_PER_TOKEN, BYTES_PER_SCORE = 40, 200
"""Memory of a token of a prompt, and of a log-probability of one."""


def default_window(max_seqs: int) -> int:
    """Rows that suffice to order the last ones by their work (see `EngineFeed`), and do not take much memory."""
    return max(4 * max_seqs, min(16 * max_seqs, 2048))


def weight_of(data: bytes | None) -> int:
    """About how many bytes of memory a line takes once it is read, without the tokens of its prompt."""
    data = data or b""
    return (
        BYTES_PER_ROW
        + (3 if data.isascii() else 5) * len(data)
        + BYTES_PER_OBJECT * data.count(b"{")
        + BYTES_PER_LIST * data.count(b"[")
        + BYTES_PER_VALUE * (data.count(b",") + data.count(b":"))
    )


class Window:
    """Bounds the rows that are in flight or held back, and the bytes of memory that they take.

    The reader's thread acquires a place for each row, and the writer's thread releases it; they share only a queue.

    waited_s: seconds in which the reader waited for a place
    """

    def __init__(self, rows: int, size: int) -> None:
        self._max_rows, self._bytes_left = rows, size
        self._sizes: dict[int, int] = {}
        self._released: queue.SimpleQueue[Iterable[int] | None] = queue.SimpleQueue()
        self.waited_s = 0.0

    def acquire(self, position: int, size: int) -> bool:
        """Waits until there is a place for the row at a position, of a size in bytes. One that is too large goes alone.

        Returns False if the window was closed in the meantime.
        """
        while len(self._sizes) >= self._max_rows or (self._bytes_left < size and self._sizes):
            since = time.monotonic()
            positions = self._released.get()
            self.waited_s += time.monotonic() - since
            if positions is None:
                return False
            for released in positions:
                self._bytes_left += self._sizes.pop(released)
        self._sizes[position] = size
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


ReplicaState = Literal["starting", "running", "restarting", "gone"]

POLL_SECONDS = 0.2

PROMPT_TOKENS_PER_OUTPUT_TOKEN = 8
"""Tokens of a prompt that take about as long as one of an output, because many are computed at once."""


class WorkAhead(NamedTuple):
    """The rows that were read and are not finished.

    rows:           their number
    prompt_tokens:  of all their prompts; `prompts_to_come`, of those of which nothing was generated yet
    output_tokens:  that they will probably still get
    longest_likely: of these, those of the output that gets the most
    longest:        most tokens that one output may still get
    is_last:        whether the input has ended, and all rows were given to the engine
    """

    rows: int = 0
    prompt_tokens: int = 0
    prompts_to_come: int = 0
    output_tokens: int = 0
    longest_likely: int = 0
    longest: int = 0
    is_last: bool = False


class EndOfInput(NamedTuple):
    """The reader's last message: how many rows it took, and the error that ended the input early."""

    rows: int
    error: BaseException | None = None


STOP_REQUESTED = object()
"""A message that asks the stream to end. Rows that were finished before it are still given."""


class RowStream(ABC):
    """Takes the lines of an input, and gives their rows as they finish.

    A thread of its own, the reader, takes the lines; others compute the rows. All of them put messages into the inbox
    of the consumer, which iterates over `finished`.

    window:        bounds the rows between reader and consumer
    signum:        of the signal that has interrupted it
    started_at:    when the first row was taken, in seconds of `time.monotonic`; `interrupted_at`: when that came
    output_tokens: tokens generated so far
    poll_s:        how long `finished` waits for rows before it gives none
    has_given_all: whether `finished` has given every row of its source; true with the last of them already
    """

    max_messages = 256
    """Most messages that are taken at once."""

    def __init__(self, rows: int, size: int) -> None:
        """Most rows, and bytes of memory of them, that are read and not yet released."""
        self.window = Window(rows, size)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        """Indices of lines to leave out, in addition to those that are kept."""
        self._num_ended = self.output_tokens = 0
        """Rows of which nothing more will come."""
        self._is_over = self.has_given_all = False
        self.signum: int | None = None
        self.started_at: float | None = None
        self.interrupted_at: float | None = None
        self.poll_s = POLL_SECONDS

    def finished(self, source: Iterable[Line], kept: Container[int] = ()) -> Generator[list[Row]]:
        """Yields the rows that have finished since the last time, now and then none, until all lines have been read.

        kept: indices of lines to leave out

        The consumer releases in `window` the rows it is done with. Leaving the iteration cancels what is in flight.

        Raises, after all rows that were finished: EngineError if the last row cannot be computed any more, and what
        the source raises.
        """
        end: EndOfInput | None = None
        num_given = 0
        self._begin()
        threading.Thread(target=self._read_rows, args=(source, kept), name="cbatch-reader", daemon=True).start()
        try:
            while end is None or self._num_ended < end.rows:
                messages = self._next_messages()
                rows = self._take(messages)
                num_given += len(rows)
                end = next((message for message in messages if isinstance(message, EndOfInput)), end)
                self.has_given_all = end is not None and end.error is None and num_given == end.rows
                yield rows
                has_failed = self._has_failed(messages)
                if has_failed or STOP_REQUESTED in messages:  # only now: what was finished before it has been given
                    rows = self._last_rows()
                    num_given += len(rows)
                    yield rows
                    if has_failed:
                        break
                    return
        finally:
            self._end()
        if end is not None and end.error is not None:
            raise end.error
        if end is None or num_given < end.rows:
            raise self._failure()

    def interrupt(self, signum: int) -> None:
        """Ends `finished` once it has given the rows that are finished by now. May be called in a signal handler."""
        self.signum, self.interrupted_at = signum, time.monotonic()
        self._inbox.put(STOP_REQUESTED)

    def ahead(self) -> WorkAhead | None:
        """The work that is left of the rows that were read; None if that is not known."""
        return None

    # What computes the rows. The consumer calls these:

    def _begin(self) -> None:  # noqa: B027
        """Prepares for the first row."""

    @abstractmethod
    def _take(self, messages: list[Any]) -> list[Row]:
        """The rows that are finished by these messages. Counts them in `_num_ended`."""

    @abstractmethod
    def _has_failed(self, messages: list[Any]) -> bool:
        """Whether no further row can be computed. Called after each round of messages."""

    def _last_rows(self) -> list[Row]:
        """The rows that can still be had when the stream ends early."""
        return []

    @abstractmethod
    def _end(self) -> None:
        """Stops the reader, and cancels what is in flight."""

    @abstractmethod
    def _failure(self) -> BaseException:
        """Why rows are missing at the end."""

    # And the reader these:

    @abstractmethod
    def _room(self, line: Line) -> int:
        """Bytes of memory that the row of a line takes at most."""

    @abstractmethod
    def _start(self, row: Row) -> int:
        """Lets a row be computed. Returns the bytes of memory that it takes."""

    @abstractmethod
    def _end_input(self) -> None:
        """No further row will come."""

    def _read_rows(self, source: Iterable[Line], kept: Container[int]) -> None:
        position = 0
        error: BaseException | None = None
        try:
            for line in source:
                if line.index in kept or line.index in self._cancelled:
                    continue
                if not self.window.acquire(position, self._room(line)) or self._is_over:
                    break
                row = Row(position, line.index)
                row.line, row.taken_at = line, time.monotonic()
                self.started_at = self.started_at or row.taken_at
                self.window.settle(position, self._start(row))
                position += 1
        except BaseException as raised:  # the consumer ends with it, also with the SystemExit of a source
            error = raised
        try:
            self._end_input()
        except BaseException as raised:
            error = error or raised
        self._inbox.put(EndOfInput(position, error))

    def _next_messages(self) -> list[Any]:
        """The messages that have come since the last call. Waits at most `poll_s` for the first one."""
        messages: list[Any] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=self.poll_s))
            while len(messages) < self.max_messages:
                messages.append(self._inbox.get_nowait())
        return messages

    def _messages_by_now(self) -> list[Any]:
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]  # nobody else takes any


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """How one replica is.

    name:    such as `replica 2`
    stats:   of all its lives
    rows:    number of rows that it was the first to finish
    copies:  number of rows that it took although another replica had them
    deaths:  how often it ended before it was told to
    problem: what happened the latest time
    """

    name: str
    state: ReplicaState
    stats: EngineStats
    rows: int = 0
    copies: int = 0
    deaths: int = 0
    problem: str = ""

    def death_words(self) -> str:
        """Why it died the last time, and how often it did."""
        return self.problem + (f" (the last of {self.deaths:,} deaths)" if self.deaths > 1 else "")


class BatchDriver(Protocol):
    """Runs the rows of batches, one batch at a time, on one engine or on several that are alike."""

    @property
    def limits(self) -> EngineLimits:
        """The limits of one engine."""

    @property
    def num_engines(self) -> int: ...

    @property
    def model_parts(self) -> Mapping[str, str]:
        """The parts that decide the model's fingerprint, by names for people (see `Origin`)."""

    def stats(self) -> EngineStats:
        """The sums over all engines, those that have died included (see `total_stats`)."""

    def each(self) -> Sequence[ReplicaStatus]:
        """How each replica is; none for an engine of this process."""

    def keyed(self, options: RowOptions, lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        """The lines in their order, each with the key of its row of output; reads only so far ahead.

        Raises RequestError if the options' defaults are wrong.
        """

    def open(self, options: RowOptions, *, window: int | None = None) -> RowStream:
        """Begins a batch.

        window: most rows between reading and writing; None: some for each request that runs at once

        Raises RequestError if the options' defaults are wrong.
        """
