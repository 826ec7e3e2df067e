"""Runs the rows of a batch on an engine of this process."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from contextlib import closing

from cbatch.batch.driver import ReplicaStatus, StreamObserver
from cbatch.batch.jsonl import format_result
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line
from cbatch.batch.ordering.work_ahead import WorkAhead
from cbatch.batch.output_row import OutputRow, RowOutcome
from cbatch.batch.row_options import RowOptions
from cbatch.batch.row_stream import FinishedRow, RowStream
from cbatch.batch.window import default_window
from cbatch.engine.stats import EngineStats
from cbatch.engine.thread import EngineThread
from cbatch.requests.completion import Completion
from cbatch.schedule.limits import EngineLimits


class EngineDriver:
    """A `BatchDriver` of one engine, which other front ends may use meanwhile."""

    num_engines = 1

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread

    @property
    def limits(self) -> EngineLimits:
        return self._engine_thread.engine.limits

    def stats(self) -> EngineStats:
        return self._engine_thread.stats()

    def each(self) -> Sequence[ReplicaStatus]:
        return ()

    def keyed(self, options: RowOptions, lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        return LineProcessor.of(self._engine_thread.engine, options).keyed(lines)

    def open(self, options: RowOptions, *, window: int | None, observer: StreamObserver) -> EngineRows:
        stream = RowStream(
            self._engine_thread,
            LineProcessor.of(self._engine_thread.engine, options),
            window=window or default_window(self.limits.max_seqs),
            observer=observer,
            reorders=options.reorders,
        )
        return EngineRows(stream, timings=options.timings)


class EngineRows:
    """The `RowSource` of one engine: a stream of rows, as rows of output."""

    def __init__(self, stream: RowStream, *, timings: bool) -> None:
        self._stream = stream
        self._timings = timings

    def finished(self, source: Iterable[Line], kept: Container[int] = ()) -> Generator[list[OutputRow]]:
        with closing(self._stream.finished(source, kept)) as finished:
            for rows in finished:
                yield [output_row(row, timings=self._timings) for row in rows]

    def release(self, positions: Iterable[int]) -> None:
        self._stream.release(positions)

    def stop(self) -> None:
        self._stream.stop()

    def ahead(self) -> WorkAhead:
        return self._stream.ahead()

    @property
    def waited_for_consumer_s(self) -> float:
        return self._stream.waited_for_consumer_s


def output_row(row: FinishedRow, *, timings: bool = False) -> OutputRow:
    """The row of output of a finished row."""
    completion = row.completion
    data = format_result(completion.to_dict(timings=timings))
    return OutputRow(row.position, completion.index, data, outcome_of(completion), completion.timing.finished_at)


def outcome_of(completion: Completion) -> RowOutcome:
    """What a run counts of a completion."""
    error, validation = completion.error, completion.validation
    code, message = (None, "") if error is None else (error.code, str(error))
    if error is not None and validation is None:
        return RowOutcome(code, message)
    timing, usage, reused = completion.timing, completion.usage, completion.reused
    ttft_s = tpot_s = None
    if timing.first_token_at is not None and not completion.from_cache:
        ttft_s = timing.first_token_at - timing.taken_at
        longest = max(len(choice.token_ids) for choice in completion.choices)
        if longest > 1 and not completion.continued_tokens:
            tpot_s = (timing.finished_at - timing.first_token_at) / (longest - 1)
    return RowOutcome(
        code,
        message,
        usage.prompt_tokens - reused.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens - reused.completion_tokens,
        ttft_s,
        tpot_s,
        reused.completion_tokens,
        completion.from_cache,
        len(validation["errors"]) + validation["valid"] if validation is not None else 0,
        completion.continued_tokens,
    )
