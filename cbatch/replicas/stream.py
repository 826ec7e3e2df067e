"""The rows of a batch on their way through replicas.

Threads that work side by side:

- The reader of the stream gives lines to the dispatcher.
- Each replica's supervisor (`run`) takes rows from the dispatcher, exchanges them for finished ones, and sends these
  to the consumer's inbox.
- The consumer, which iterates over `finished`, takes the rows that are finished.

A window bounds the rows between reader and consumer. One lock guards the dispatcher.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from cbatch.base.errors import CbatchError, EngineError, RequestError
from cbatch.batch.driver import WINDOW_BYTES, RowStream
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.replicas.connection import MAX_MESSAGE_BYTES, FinishedRow, linger_s
from cbatch.replicas.dispatcher import MAX_DEATHS, Dispatcher, beginnings
from cbatch.replicas.supervisor import IDLE_SECONDS, Job, Life, SharedState
from cbatch.tools.tool import NUM_CALLS

WAIT_SECONDS, STARVING_WAIT_SECONDS = 0.2, 0.05
"""How long a replica waits for its rows before it answers; and if it has room for rows that may still be read."""

STOP_SECONDS = 0.8
"""How long the end of a batch waits for the rows that replicas have finished by then."""


class Delivery(NamedTuple):
    """The result of an exchange: rows, and the number of tokens generated since the one before."""

    rows: list[Row]
    num_tokens: int


class ReplicaStream(RowStream, Job):
    """Runs the rows of one input on replicas: a `RowStream`, and the job of the replicas meanwhile."""

    max_messages = 64

    def __init__(self, shared: SharedState, options: RowOptions, *, window: int) -> None:
        """`window`: most rows that are read and not yet released."""
        super().__init__(window, max(WINDOW_BYTES, shared.num_alive * MAX_MESSAGE_BYTES))
        self._shared = shared
        self._options = options
        self._tools = {tool.name: tool for tool in options.tools}
        self._callers = ThreadPoolExecutor(NUM_CALLS * max(shared.num_alive, 1), "cbatch-tool")
        self._is_stopped = threading.Event()
        self._dispatcher = Dispatcher()
        self._rows_came = threading.Condition(shared.lock)
        """Tells replicas with nothing to do that there is something."""
        self._linger_s = linger_s(shared.num_alive)
        self._num_tokens: dict[int, int] = {}
        """Tokens that each replica that takes part has generated in this life."""
        self._error: CbatchError | None = None

    # The consumer's thread.

    def _begin(self) -> None:
        self._shared.begin(self)

    def _has_failed(self, messages: list[Any]) -> bool:
        return self._cause is not None

    def _failure(self) -> BaseException:
        error = self._cause
        return error if isinstance(error, EngineError | RequestError) else EngineError(str(error))

    @property
    def _cause(self) -> CbatchError | None:
        return self._error or self._shared.failure

    def _take(self, messages: list[Any]) -> list[Row]:
        found: list[Row] = []
        for rows, num_tokens in (message for message in messages if isinstance(message, Delivery)):
            found += rows
            self.output_tokens += num_tokens
        self._num_ended += len(found)
        return found

    def _last_rows(self) -> list[Row]:
        """The rows that replicas have finished by now; not of those that take long to say it."""
        self._end()
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: not self._num_tokens, STOP_SECONDS)
        return self._take(self._messages_by_now())

    def _end(self) -> None:
        """Stops the reader, and lets the replicas cancel what is unfinished."""
        self.window.close()
        self._is_stopped.set()
        self._callers.shutdown(wait=False, cancel_futures=True)
        with self._shared.changed:
            self._is_over = True
            self._rows_came.notify_all()
        self._shared.end(self)

    # The reader's thread.

    def _room(self, line: Line) -> int:
        return len(line.data or b"")

    def _start(self, row: Row) -> int:
        row.beginnings = beginnings(row.line)
        with self._shared.lock:
            self._dispatcher.add(row)
            self._rows_came.notify()
        return self._room(row.line)

    def _end_input(self) -> None:
        with self._shared.lock:
            self._dispatcher.end_input()
            self._rows_came.notify_all()

    # The threads of the supervisors.

    def run(self, life: Life) -> None:
        shared, number = self._shared, life.number
        try:
            life.call("begin", self._options)
        except RequestError as error:  # another replica than the one that `open` has asked refuses the options
            self._error = error
            return
        with shared.lock:
            self._dispatcher.join(number, life.info.limits.max_seqs)
            self._num_tokens[number] = 0
        try:
            while not self._is_over:
                if shared.is_closing:
                    return
                self._exchange(life)
            finished = True
            while finished:  # what there is; the rest is cancelled
                reply = life.exchange([], [], 0.0)
                self._deliver(life, reply.finished, reply.num_tokens)
                finished = bool(reply.finished)
            life.call("close")
        finally:
            with shared.changed:
                del self._num_tokens[number]
                self._dispatcher.leave(number)
                self._rows_came.notify_all()
                shared.changed.notify_all()

    def _exchange(self, life: Life) -> None:
        """Gives a replica rows for finished ones. Waits at most IDLE_SECONDS if there is nothing to do."""
        number = life.number
        with self._shared.lock:
            work = self._dispatcher.take(number)
            if not work and not self._dispatcher.num_held(number) and not self._is_over:
                self._rows_came.wait(IDLE_SECONDS)
                work = self._dispatcher.take(number)
            if self._is_over:
                return
            life.num_copies += work.num_copies
            life.runs_alone = self._dispatcher.runs_alone(number)
            wait_s = 0.0
            if self._dispatcher.num_held(number):
                # Calls of tools, and their results, come and go with an exchange.
                is_short = self._dispatcher.is_starving(number) or self._tools
                wait_s = max(STARVING_WAIT_SECONDS if is_short else WAIT_SECONDS, self._linger_s)
        if results := dict(life.results.get_nowait() for _ in range(life.results.qsize())):
            life.call("answer", results)
        reply = life.exchange(work.rows, work.cancelled, wait_s, self._linger_s)
        self._deliver(life, reply.finished, reply.num_tokens)
        with suppress(RuntimeError):  # the batch has ended meanwhile
            for call in reply.calls:
                self._callers.submit(self._run_tool, life, *call)
        with self._shared.lock:
            num_held = self._dispatcher.num_held(number)
        life.check(reply, num_held)

    def _run_tool(self, life: Life, number: int, name: str, arguments: str) -> None:
        life.results.put((number, self._tools[name].run(arguments, self._is_stopped)))

    def _deliver(self, life: Life, finished: list[FinishedRow], num_tokens: int) -> None:
        """Sends the consumer the rows of a reply that nobody has finished before.

        They are counted first: whoever has the last row of a batch sees all of them in the figures.
        """
        now = time.monotonic()
        rows: list[Row] = []
        with self._shared.lock:
            for index, data, outcome in finished:
                if (row := self._dispatcher.finish(life.number, index)) is not None:
                    row.receive(data, outcome, now)
                    rows.append(row)
        new_tokens = num_tokens - self._num_tokens[life.number]
        self._num_tokens[life.number] = num_tokens
        life.num_rows += sum(row.deaths < MAX_DEATHS for row in rows)
        if rows or new_tokens:
            self._inbox.put(Delivery(rows, new_tokens))
