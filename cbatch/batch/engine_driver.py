"""Runs the rows of a batch on an engine of this process.

An answer need not be the end of its row: the tools that it calls are run, and it may be validated, on further threads,
which submit the row's next request. What a cache of answers has is not submitted. A journal may keep the tokens of rows
that are not finished, for a later run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cbatch.base.errors import EngineError, in_short
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import Request
from cbatch.batch.driver import (
    BYTES_PER_SCORE,
    BYTES_PER_TOKEN,
    WINDOW_BYTES,
    ReplicaStatus,
    RowStream,
    WorkAhead,
    default_window,
    weight_of,
)
from cbatch.batch.earlier_outputs import CachedOutputs, JournaledOutputs
from cbatch.batch.feed import EngineFeed, OutputForecast, beginning_of, output_limit
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.rounds import Rounds
from cbatch.batch.row import NO_TOKENS, Row
from cbatch.engine.stats import EngineStats
from cbatch.engine.thread import EngineThread
from cbatch.requests.completion import Completion, Timing
from cbatch.requests.output_processor import OutputProcessor
from cbatch.schedule.limits import EngineLimits


class EngineDriver:
    """A `BatchDriver` of one engine, which other front ends may use meanwhile."""

    num_engines = 1

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread

    @property
    def limits(self) -> EngineLimits:
        return self._engine_thread.engine.limits

    @property
    def model_parts(self) -> Mapping[str, str]:
        return self._engine_thread.engine.fingerprint_parts

    def stats(self) -> EngineStats:
        return self._engine_thread.stats()

    def each(self) -> Sequence[ReplicaStatus]:
        return ()

    def keyed(self, options: RowOptions, lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        processor = LineProcessor.of(self._engine_thread.engine, options)
        return ((line, processor.key(line)) for line in lines)

    def open(self, options: RowOptions, *, window: int | None = None) -> EngineStream:
        lines = LineProcessor.of(self._engine_thread.engine, options)
        return EngineStream(self._engine_thread, lines, window=window or default_window(self.limits.max_seqs))


class EndOfAnswer(NamedTuple):
    """The request of a row has ended, or the row has, with a result.

    how: `lost` if the engine failed or was closed, so that there is no answer; `cancelled` if there will be none
    """

    row: Row
    how: Literal["computed", "cached", "lost", "cancelled", "result"]
    result: Completion | None = None


class EngineStream(RowStream):
    """Runs the rows of one input on an engine's thread, which calls back (`_take_event`) for each token.

    Messages to the consumer are ends of answers, and exceptions of threads that could not do their part.
    """

    def __init__(self, engine_thread: EngineThread, lines: LineProcessor, *, window: int) -> None:
        """
        window: most rows that are read and not yet released

        Raises ConfigError if the cache or the journal of tokens of the options cannot be used.
        """
        super().__init__(window, WINDOW_BYTES)
        options, engine = lines.options, engine_thread.engine
        self._engine_thread, self._lines = engine_thread, lines
        self._limits = engine.scheduler.sequence_limits
        self._forecast = OutputForecast()
        self._feed = EngineFeed(engine_thread, self._forecast, self._take_event, reorders=options.reorders)
        self._in_flight: dict[int, Row] = {}
        """By their positions."""
        follows = bool(options.tools) or options.validation is not None
        self._rounds = Rounds(options, lines.inputs, self._go_on) if follows else None
        self._cache = CachedOutputs(engine, options.cache) if options.cache is not None else None
        journal = options.token_journal
        self._token_journal = JournaledOutputs(engine, journal) if journal is not None else None

    def cancel(self, index: int) -> None:
        """Leaves out the row of a line, unless it is finished. Called by the consumer."""
        self._cancelled.add(index)
        for row in list(self._in_flight.values()):
            if row.index == index:
                self._cancel(row)

    def finished_by_now(self) -> list[Row]:
        """The rows that have finished since `finished` gave some; for a consumer that leaves its iteration."""
        return self._take(self._messages_by_now())

    def ahead(self) -> WorkAhead:
        return self._feed.ahead(list(self._in_flight.values()))

    # The reader's thread.

    def _room(self, line: Line) -> int:
        """No token of a prompt is shorter than a byte."""
        return weight_of(line.data) + BYTES_PER_TOKEN * min(len(line.data or b""), self._limits.context)

    def _start(self, row: Row) -> int:
        weight = weight_of(row.line.data)
        request = self._lines.process(row.line)
        if isinstance(request, Completion):
            request.timing = Timing(row.taken_at, finished_at=time.monotonic())
            self._inbox.put(EndOfAnswer(row, "result", request))
            return weight
        self._submit(row, request)
        scores = 1 + request.params.prompt_logprobs if request.params.prompt_logprobs is not None else 0
        return weight + (BYTES_PER_TOKEN + BYTES_PER_SCORE * scores) * request.num_prompt_tokens

    def _end_input(self) -> None:
        with self._reporting():
            self._feed.end_input()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._inbox.put(error)
            raise

    def _submit(self, row: Row, request: Request, *, goes_on: bool = False) -> None:
        """Puts a request of a row into the feed. `goes_on`: whether it follows on others of the row."""
        if self._token_journal is not None:
            self._token_journal.continue_(request)
        row.request, row.outputs = request, self._engine_thread.engine.output_processor(request)
        if self._cache is not None and not request.is_pooled:
            if self._cache.replay(row.outputs):
                self._inbox.put(EndOfAnswer(row, "cached"))
                return
            if self._cache.defer(row):
                return
        row.limit = output_limit(self._limits, request)
        likely = self._forecast.remaining(request, row.limit)
        row.tokens = request.num_prompt_tokens + request.num_outputs * likely
        row.beginning = beginning_of(request.prompt_ids)
        if self._token_journal is not None:
            self._token_journal.follow(row)
        self._in_flight[row.position] = row
        self._feed.put(row, goes_on=goes_on)
        if row.index in self._cancelled and not self._is_over:  # `cancel` may have run before it was there
            self._cancel(row)

    def _take_event(self, row: Row, event: TokenEvent) -> None:
        """Runs on the engine's thread."""
        with self._reporting():
            row.outputs.take(event)
            if event.token_id is not None and not event.is_known:
                self.output_tokens += 1
            if event.finish_reason is not None:
                self._feed.output_ended(row.position)  # before anybody can go on with the row
            if row.outputs.is_finished:
                is_lost = event.error is not None and self._engine_thread.has_ended
                self._inbox.put(EndOfAnswer(row, "lost" if is_lost else "computed"))

    def _cancel(self, row: Row) -> None:
        self._feed.cancel(row)
        self._inbox.put(EndOfAnswer(row, "cancelled"))

    # The consumer's thread.

    def _next_messages(self) -> list[Any]:
        if self._token_journal is not None:
            self._token_journal.tick()
        return super()._next_messages()

    def _take(self, messages: list[Any]) -> list[Row]:
        """The finished rows among the messages, but those that the engine has lost.

        Their texts are made here, and not on the engine's thread.
        """
        finished: list[Row] = []
        computed: list[OutputProcessor] = []
        ended: list[Request] = []
        for message in messages:
            if not isinstance(message, EndOfAnswer):
                continue
            row, how, completion = message
            was_in_flight = self._in_flight.pop(row.position, None) is not None
            if how in ("computed", "lost", "cancelled"):
                if not was_in_flight:
                    continue  # it ended before it was cancelled, or the other way round
                ended.append(row.request)
            if how == "cancelled":
                self._end_row(row)
                self.window.release([row.position])
                continue
            if how in ("computed", "lost"):
                for output in row.outputs.outputs:
                    if output.finish_reason in ("stop", "length"):
                        self._forecast.observe(row.request, row.limit, len(output.token_ids))
                computed.append(row.outputs)
            if how == "lost":
                self._num_ended += 1
                continue
            if completion is None:
                completion = row.outputs.completion()
                if row.usage is NO_TOKENS:  # a further request of the row counts from the slot of the first
                    row.taken_at = row.request.started_at or row.taken_at
                completion.timing = replace(completion.timing, taken_at=row.taken_at)
                if how == "cached":
                    completion.reused = completion.usage
                completion.usage, completion.reused = row.usage + completion.usage, row.reused + completion.reused
                row.usage, row.reused = completion.usage, completion.reused
                if self._rounds is not None and self._rounds.take(row, completion):
                    continue
            row.finish(completion)
            self._end_row(row)
            finished.append(row)
        if self._cache is not None and ended:
            self._cache.keep(computed)
            for row in [row for request in ended for row in self._cache.settle(request)]:
                self._submit(row, row.request)
        return finished

    def _end_row(self, row: Row) -> None:
        self._num_ended += 1
        if self._token_journal is not None:
            self._token_journal.forget(row)

    def _go_on(self, row: Row, following: Request | Completion) -> None:
        """Goes on with a row, or ends it, on the threads of its rounds."""
        with self._reporting():
            if isinstance(following, Completion):
                self._inbox.put(EndOfAnswer(row, "result", following))
            else:
                self._submit(row, following, goes_on=True)

    def _has_failed(self, messages: list[Any]) -> bool:
        if (failed := next((one for one in messages if isinstance(one, BaseException)), None)) is not None:
            raise EngineError(f"The run failed: {in_short(failed)}.") from failed
        return not messages and self._engine_thread.has_ended  # and the reader may wait for its source

    def _failure(self) -> EngineError:
        failure = self._engine_thread.failure
        if failure is None:
            return EngineError("The engine was closed before the last row was finished.")
        error = EngineError(f"The engine failed: {failure}.")
        error.__cause__ = failure
        return error

    def _end(self) -> None:
        """Other front ends have the engine from now on."""
        self._is_over = True
        self._feed.close()
        self.window.close()
        for part in (self._rounds, self._token_journal, self._cache):
            if part is not None:
                part.close()
        for row in list(self._in_flight.values()):
            self._engine_thread.cancel(row.request)
