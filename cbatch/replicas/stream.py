"""The rows of a batch on their way through replicas.

Threads that work side by side:

- The reader (`_read_rows`) gives lines to the dispatcher.
- Each replica's supervisor (`serve`) takes rows from the dispatcher, exchanges them for finished ones, and sends these
  to the consumer's inbox.
- The consumer, which iterates over `finished`, takes the rows that are finished.

A window bounds the rows between reader and consumer. One lock guards the dispatcher.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Container, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass

from cbatch.base.errors import CbatchError, EngineError, RequestError
from cbatch.batch.driver import StreamObserver
from cbatch.batch.lines import Line
from cbatch.batch.output_row import OutputRow
from cbatch.batch.row_options import RowOptions
from cbatch.batch.window import WINDOW_BYTES, Window
from cbatch.replicas.affinity import beginnings
from cbatch.replicas.dispatcher import MAX_DEATHS, Dispatcher
from cbatch.replicas.messages import MAX_MESSAGE_BYTES, FinishedRow, linger_s
from cbatch.replicas.supervisor import IDLE_SECONDS, Life, SharedState

POLL_SECONDS = 0.2
MAX_MESSAGES_AT_ONCE = 64

WAIT_SECONDS, STARVING_WAIT_SECONDS = 0.2, 0.05
"""How long a replica waits for its rows before it answers; and if it has room for rows that may still be read."""

STOP_SECONDS = 0.8
"""How long the end of a batch waits for the rows that replicas have finished by then."""

FAILED = f"The row was not finished: the replicas that ran it died {MAX_DEATHS} times."


@dataclass(frozen=True, slots=True)
class Delivery:
    """What an exchange has given: rows, and the number of tokens that were generated since the one before."""

    rows: list[OutputRow]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The reader's last message: how many rows it took, and the error that ended the input early."""

    rows: int
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asks the stream to end. Rows that were finished before it are still given."""


Message = Delivery | EndOfInput | StopRequested


class ReplicaStream:
    """Runs the rows of one input on replicas: a `RowSource`, and the job of the replicas meanwhile."""

    def __init__(self, shared: SharedState, options: RowOptions, *, window: int, observer: StreamObserver) -> None:
        """`window`: most rows that are read and not yet released."""
        self._shared = shared
        self._options = options
        self._observer = observer
        self._window = Window(window, max(WINDOW_BYTES, shared.num_alive * MAX_MESSAGE_BYTES))
        self._dispatcher = Dispatcher()
        self._rows_came = threading.Condition(shared.lock)
        """Tells replicas with nothing to do that there is something."""
        self._num_idle = 0
        self._linger_s = linger_s(shared.num_alive)
        self._num_tokens: dict[int, int] = {}
        """Tokens that each replica that takes part has generated in this life."""
        self._is_over = False
        self._error: CbatchError | None = None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()

    # The consumer's thread.

    def finished(self, source: Iterable[Line], kept: Container[int] = ()) -> Generator[list[OutputRow]]:
        """Yields the rows that have finished since the last time; see `RowSource`."""
        self._shared.begin(self)
        end: EndOfInput | None = None
        num_given = 0
        threading.Thread(target=self._read_rows, args=(source, kept), name="cbatch-reader", daemon=True).start()
        try:
            while end is None or num_given < end.rows:
                messages = self._next_messages()
                rows = self._take_rows(messages)
                num_given += len(rows)
                end = next((message for message in messages if isinstance(message, EndOfInput)), end)
                yield rows
                has_failed = self._failure is not None
                if has_failed or StopRequested() in messages:
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
        if (error := self._failure) is not None and (end is None or num_given < end.rows):
            raise error if isinstance(error, EngineError | RequestError) else EngineError(str(error)) from error

    def release(self, positions: Iterable[int]) -> None:
        self._window.release(positions)

    def stop(self) -> None:
        self._inbox.put(StopRequested())

    def ahead(self) -> None:
        return None

    @property
    def waited_for_consumer_s(self) -> float:
        return self._window.waited_s

    @property
    def _failure(self) -> CbatchError | None:
        return self._error or self._shared.failure

    def _next_messages(self) -> list[Message]:
        """All messages that have come since the last call. Waits at most POLL_SECONDS for the first one."""
        messages: list[Message] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=POLL_SECONDS))
            while len(messages) < MAX_MESSAGES_AT_ONCE:
                messages.append(self._inbox.get_nowait())
        return messages

    def _take_rows(self, messages: list[Message]) -> list[OutputRow]:
        rows: list[OutputRow] = []
        for message in messages:
            if isinstance(message, Delivery):
                rows += message.rows
                self._observer.output_tokens += message.num_tokens
        return rows

    def _last_rows(self) -> list[OutputRow]:
        """What the replicas have finished by now; not of those that take long to say it."""
        self._end()
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: not self._num_tokens, STOP_SECONDS)
        messages: list[Message] = []
        with suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return self._take_rows(messages)

    def _end(self) -> None:
        """Stops the reader, and lets the replicas cancel what is unfinished."""
        self._window.close()
        with self._shared.changed:
            self._is_over = True
            self._rows_came.notify_all()
        self._shared.end(self)

    # The reader's thread.

    def _read_rows(self, source: Iterable[Line], kept: Container[int]) -> None:
        position = 0
        error: BaseException | None = None
        try:
            for line in source:
                if line.index in kept:
                    continue
                if not self._window.acquire(position, len(line.data or b"")) or self._is_over:
                    break
                now = time.monotonic()
                self._observer.start(now)
                self._add(position, line, now)
                position += 1
        except BaseException as raised:  # the consumer ends with it, also with the SystemExit of a source
            error = raised
        try:
            with self._shared.lock:
                self._dispatcher.end_input()
                self._rows_came.notify_all()
        except BaseException as raised:
            error = error or raised
        self._inbox.put(EndOfInput(position, error))

    def _add(self, position: int, line: Line, now: float) -> None:
        found = beginnings(line)
        with self._shared.lock:
            self._dispatcher.add(position, line, now, found)
            if self._num_idle:
                self._rows_came.notify()

    # The threads of the supervisors.

    def begin(self, life: Life) -> None:
        try:
            life.call("begin", self._options)
        except RequestError as error:  # another replica than the one that `open` has asked refuses the options
            self._error = error
            return
        with self._shared.lock:
            self._num_tokens[life.number] = 0
            self._dispatcher.join(life.number, life.info.limits.max_seqs)

    def serve(self, life: Life) -> None:
        number = life.number
        with self._shared.lock:
            if number not in self._num_tokens:  # it has refused the batch, which ends
                self._rows_came.wait_for(lambda: self._is_over, IDLE_SECONDS)
                return
            work = self._dispatcher.take(number, time.monotonic())
            if not work and not self._dispatcher.num_held(number) and not self._is_over:
                self._num_idle += 1
                self._rows_came.wait(IDLE_SECONDS)
                self._num_idle -= 1
                work = self._dispatcher.take(number, time.monotonic())
            if self._is_over:
                return
            life.num_copies += work.num_copies
            life.runs_alone = self._dispatcher.runs_alone(number)
            wait_s = 0.0 if work.failed else self._wait_s(number)
        if work.failed:
            self._deliver(life, life.failed(work.failed, FAILED), self._num_tokens[number], are_counted=False)
        reply = life.exchange(work.rows, work.cancelled, wait_s, self._linger_s)
        self._deliver(life, reply.finished, reply.num_tokens)
        with self._shared.lock:
            num_held = self._dispatcher.num_held(number)
        life.check(reply, num_held)

    def end(self, life: Life) -> None:
        """Fetches what the replica has finished, and lets it cancel the rest."""
        if life.number in self._num_tokens:
            reply = life.exchange([], [], 0.0)
            while reply.finished:
                self._deliver(life, reply.finished, reply.num_tokens)
                reply = life.exchange([], [], 0.0)
            life.call("close")
            self._forget(life)

    def leave(self, life: Life) -> None:
        self._forget(life)

    def _forget(self, life: Life) -> None:
        with self._shared.changed:
            if self._num_tokens.pop(life.number, None) is not None:
                self._dispatcher.leave(life.number)
                self._rows_came.notify_all()
                self._shared.changed.notify_all()

    def _wait_s(self, number: int) -> float:
        if not self._dispatcher.num_held(number):
            return 0.0
        wait_s = STARVING_WAIT_SECONDS if self._dispatcher.is_starving(number) else WAIT_SECONDS
        return max(wait_s, self._linger_s)

    def _deliver(self, life: Life, finished: list[FinishedRow], num_tokens: int, are_counted: bool = True) -> None:
        """Sends the consumer the rows of a reply that nobody has finished before.

        They are counted first: whoever has the last row of a batch sees all of them in the figures.
        """
        now = time.monotonic()
        rows: list[OutputRow] = []
        with self._shared.lock:
            for index, data, outcome in finished:
                found = self._dispatcher.finish(life.number, index)
                if found is None:
                    continue
                if outcome.ttft_s is not None:
                    outcome = outcome._replace(ttft_s=found.waited_s + outcome.ttft_s)
                rows.append(OutputRow(found.position, index, data, outcome, now))
        new_tokens = num_tokens - self._num_tokens[life.number]
        self._num_tokens[life.number] = num_tokens
        if are_counted:
            life.num_rows += len(rows)
        if rows or new_tokens:
            self._inbox.put(Delivery(rows, new_tokens))
