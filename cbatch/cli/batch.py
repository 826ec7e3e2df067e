"""A batch job: rows of a stream through a driver to an output.

Three threads meet here: a reader turns lines into token ids and submits them, the driver's thread runs the
engine, and the caller's thread writes what is finished. A semaphore bounds the rows between reading and writing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from cbatch.cli.jsonl import Line, Row, format_row, parse_line, read_lines
from cbatch.cli.output import Output
from cbatch.engine import (
    Completion,
    Driver,
    EngineError,
    RequestError,
    SamplingParams,
    TokenEvent,
    derive_seed,
)

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How rows are read and written.

    params:   what a row does not say itself
    seed:     of the run; a row's own seed is derived from it and the row's id or index
    window:   most rows between being read and being written
    system:   system message of conversations that have none
    raw:      prompts are plain text to continue
    as_text:  each line is a prompt, not JSON
    """

    params: SamplingParams
    seed: int
    window: int
    system: str | None = None
    raw: bool = False
    as_text: bool = False
    allow_unknown: bool = False
    token_ids: bool = False


@dataclass(slots=True)
class Job:
    """One row on its way through: the `place`-th of the output, with what has come of it so far.

    is_lost: the engine broke down under it, so it is not finished, and has no row of output.
    """

    place: int
    row: Row
    prompt_tokens: int = 0
    completion: Completion = field(default_factory=Completion)
    error: RequestError | None = None
    is_lost: bool = False

    def result(self, *, with_text: bool, with_token_ids: bool) -> dict[str, Any]:
        """The output row."""
        fields: dict[str, Any] = {"index": self.row.index, "id": self.row.id}
        if self.error is not None:
            fields["error"] = {"code": self.error.code, "message": str(self.error)}
        else:
            done = self.completion
            fields["text"] = done.text if with_text else None
            fields["finish_reason"] = done.finish_reason
            if done.stop_reason is not None:
                fields["stop_reason"] = done.stop_reason
            if with_token_ids:
                fields["token_ids"] = done.token_ids
            fields["usage"] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(done.token_ids)}
        if self.row.extra:
            fields["extra"] = self.row.extra
        return fields


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The reader's last word: how many rows it took, and what stopped it short of the end."""

    rows: int
    error: Exception | None = None


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    started: float | None = None

    def count(self, job: Job) -> None:
        self.rows += 1
        if job.error is not None:
            self.errors[job.error.code] += 1
        else:
            self.prompt_tokens += job.prompt_tokens

    @property
    def elapsed(self) -> float:
        """Seconds since the first row was taken."""
        return time.monotonic() - self.started if self.started is not None else 0.0

    @property
    def speed(self) -> float:
        """Output tokens per second so far."""
        return self.output_tokens / max(self.elapsed, 1e-9)

    def summary(self) -> list[str]:
        failed = self.errors.total()
        kinds = ", ".join(f"{code} {count}" for code, count in sorted(self.errors.items()))
        return [
            f"{self.rows - failed:,} rows ok, {failed:,} failed" + (f" ({kinds})" if kinds else ""),
            f"{self.prompt_tokens:,} prompt tokens, {self.output_tokens:,} output tokens",
            f"{self.elapsed:.1f} s, {self.speed:,.0f} output tokens/s",
        ]


class Batch:
    """Feeds rows to a driver and hands finished ones to an output."""

    def __init__(self, driver: Driver, output: Output, options: BatchOptions) -> None:
        self._driver = driver
        self._engine = driver.engine
        self._output = output
        self._options = options
        self._window = threading.Semaphore(options.window)
        self._finished: queue.SimpleQueue[Job | EndOfInput] = queue.SimpleQueue()
        self.tally = Tally()

    def run(self, stream: IO[bytes], on_progress: Callable[[int], None]) -> Tally:
        """Until every row of the stream is written. Raises EngineError where the engine or the input fails.

        Rows that are finished by then are written all the same.
        on_progress: told how many rows were just written; 0 now and then, while none is.
        """
        threading.Thread(target=self._read, args=(stream,), name="cbatch-reader", daemon=True).start()
        end: EndOfInput | None = None
        handled = 0
        while end is None or handled < end.rows:
            try:
                item = self._finished.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._driver.failure is not None:
                    break
                on_progress(0)
                continue
            if isinstance(item, EndOfInput):
                end = item
                continue
            handled += 1
            if not item.is_lost:
                self._write(item)
                on_progress(1)
        if self._driver.failure is not None:
            raise EngineError(f"The engine failed: {self._driver.failure}") from self._driver.failure
        if end is not None and end.error is not None:
            raise EngineError(f"Cannot read the input: {end.error}") from end.error
        self._output.close()
        return self.tally

    def describe(self) -> str:
        """What stands behind the number of rows in a progress display."""
        load = self._driver.load
        counts = f"{load.running} running, {load.waiting} waiting"
        return f"{self.tally.speed:,.0f} tok/s, {counts}, {load.cache_used:.0%} of KV cache"

    def _write(self, job: Job) -> None:
        with_text = self._engine.tokenizer is not None
        line = format_row(job.result(with_text=with_text, with_token_ids=self._options.token_ids))
        self.tally.count(job)
        for _ in range(self._output.write(job.place, line)):
            self._window.release()

    def _read(self, stream: IO[bytes]) -> None:
        """Runs on the reader's thread, to the end of the input or the error that stopped it."""
        place = 0
        error: Exception | None = None
        try:
            for line in read_lines(stream):
                self._window.acquire()
                if self._driver.failure is not None:
                    break
                if self.tally.started is None:
                    self.tally.started = time.monotonic()
                self._take(place, line)
                place += 1
        except Exception as raised:  # handed to the writing thread, which ends the run with it
            error = raised
        self._finished.put(EndOfInput(place, error))

    def _take(self, place: int, line: Line) -> None:
        row = parse_line(line, as_text=self._options.as_text, allow_unknown=self._options.allow_unknown)
        job = Job(place, row, error=row.error)
        if job.error is None:
            try:
                self._submit(job)
                return
            except RequestError as error:
                job.error = _at_line(error, row)
            except Exception as error:  # a row that breaks in a way nobody foresaw harms no other
                job.error = _at_line(RequestError("internal_error", repr(error)), row)
        self._finished.put(job)

    def _submit(self, job: Job) -> None:
        row = job.row
        prompt_ids = self._encode(row)
        job.prompt_tokens = len(prompt_ids)
        kind, name = ("id", row.id) if row.id is not None else ("index", row.index)
        params = self._options.params.merged({"seed": derive_seed(self._options.seed, kind, name)} | row.params)

        def take(event: TokenEvent) -> None:
            job.completion.take(event)
            if event.token_id is not None:
                self.tally.output_tokens += 1
            if event.finish_reason is not None:
                job.error = _at_line(event.error, row) if event.error else None
                job.is_lost = self._driver.failure is not None
                self._finished.put(job)

        self._driver.submit(prompt_ids, params, take, priority=row.priority)

    def _encode(self, row: Row) -> list[int]:
        if row.prompt_token_ids is not None:
            return row.prompt_token_ids
        system = self._options.system
        raw = row.raw or self._options.raw
        messages = row.messages
        if row.prompt is not None:
            if raw or system is None:
                return self._engine.encode(row.prompt, raw=raw)
            messages = [{"role": "user", "content": row.prompt}]
        assert messages is not None
        if system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return self._engine.encode({"messages": messages})


def _at_line(error: RequestError, row: Row) -> RequestError:
    """The same error, with the number of its line in front."""
    return RequestError(error.code, f"line {row.index + 1}: {error}")
