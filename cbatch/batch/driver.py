"""What runs the rows of a batch: an engine of this process (`engine_driver.py`), or replicas in others.

Nothing here imports torch: the process that drives replicas needs none.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cbatch.batch.lines import Line
from cbatch.batch.ordering.work_ahead import WorkAhead
from cbatch.batch.output_row import OutputRow
from cbatch.batch.row_options import RowOptions
from cbatch.engine.stats import EngineStats
from cbatch.schedule.limits import EngineLimits

ReplicaState = Literal["starting", "running", "restarting", "gone"]


class StreamObserver:
    """Follows the rows of a stream; this one does nothing.

    output_tokens: tokens generated so far; whoever computes the rows adds to it, on one thread
    """

    output_tokens = 0

    def start(self, now: float) -> None:
        """A row was taken at the time `now` of `time.monotonic`. Called on the reader's thread."""


class RowSource(Protocol):
    """Takes the lines of an input, and gives their rows of output as they finish."""

    def finished(self, source: Iterable[Line], kept: Container[int] = ()) -> Generator[list[OutputRow]]:
        """Yields the rows that have finished since the last time, now and then none, until all lines have been read.

        kept: indices of lines to leave out

        The consumer releases the rows it is done with. Leaving the iteration cancels what is in flight; `stop` ends it.

        Raises, after all rows that were finished: EngineError if the last row cannot be computed any more, and what
        the source raises.
        """
        ...

    def release(self, positions: Iterable[int]) -> None:
        """Makes room in the window for as many rows as there are positions."""
        ...

    def stop(self) -> None:
        """Ends `finished` once it has given the rows that are finished by now. May be called in a signal handler."""
        ...

    def ahead(self) -> WorkAhead | None:
        """What is still to be computed of the rows that were read; None if that is not known.

        Called by the consumer.
        """
        ...

    @property
    def waited_for_consumer_s(self) -> float:
        """Seconds in which the reader waited for room in the window."""
        ...


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


class BatchDriver(Protocol):
    """Runs the rows of batches, one batch at a time, on one engine or on several that are alike."""

    @property
    def limits(self) -> EngineLimits:
        """The limits of one engine."""
        ...

    @property
    def num_engines(self) -> int: ...

    def stats(self) -> EngineStats:
        """The sums over all engines, those that have died included (see `total_stats`)."""
        ...

    def each(self) -> Sequence[ReplicaStatus]:
        """How each replica is; none for an engine of this process."""
        ...

    def keyed(self, options: RowOptions, lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        """The lines in their order, each with the key of its row of output; reads only so far ahead.

        Raises RequestError if the options' defaults are wrong.
        """
        ...

    def open(self, options: RowOptions, *, window: int | None, observer: StreamObserver) -> RowSource:
        """Begins a batch.

        window: most rows between reading and writing; None: some for each request that runs at once

        Raises RequestError if the options' defaults are wrong.
        """
        ...
