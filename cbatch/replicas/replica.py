"""An engine as a replica: the side of the exchange that runs in the replica's process."""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError, ToolError
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.connection import (
    LINGER_SECONDS,
    MAX_MESSAGE_BYTES,
    MAX_REPLY_ROWS,
    FinishedRow,
    ReplicaConnection,
    ReplicaInfo,
    ReplicaLauncher,
    Reply,
)
from cbatch.runtime.cpu import tune_process


class Replica:
    """Serves the rows of one batch after another. One method is called at a time, on any thread."""

    def __init__(self, engine: Engine) -> None:
        """`engine`: belongs to the caller, and may serve others meanwhile"""
        self._engine = engine
        self._batch: _Batch | None = None

    def info(self) -> ReplicaInfo:
        return ReplicaInfo(
            fingerprint=self._engine.fingerprint,
            limits=self._engine.limits,
            description=self._engine.core.describe(),
            host=socket.gethostname(),
            pid=os.getpid(),
            parts=self._engine.core.fingerprint_parts,
        )

    def keys(self, options: RowOptions, lines: list[Line]) -> list[str]:
        """The keys of the lines' rows of output. Raises RequestError if the options' defaults are wrong."""
        processor = LineProcessor.of(self._engine.core, options)
        return [processor.key(line) for line in lines]

    def begin(self, options: RowOptions) -> None:
        """Begins a new batch. What is left of the one before is cancelled.

        Raises RequestError if the options' defaults are wrong, and EngineError if the engine is closed.
        """
        self.close()
        self._batch = _Batch(self._engine, options)

    def exchange(
        self, rows: list[Line], cancelled: list[int], wait_s: float, linger_s: float = LINGER_SECONDS
    ) -> Reply:
        """Takes rows of this batch, and gives what has finished.

        cancelled: indices of rows that need not be finished
        wait_s:    how long to wait for the first row that finishes
        linger_s:  how long to wait for more after it, unless they free half of the slots; at most `wait_s`
        """
        if self._batch is None:
            assert not rows, "begin comes first"
            return Reply([], self._engine.stats())
        finished = self._batch.exchange(rows, cancelled, wait_s, min(linger_s, wait_s))
        calls = [self._batch.calls.get_nowait() for _ in range(self._batch.calls.qsize())]
        return Reply(finished, self._engine.stats(), self._batch.stream.output_tokens, self._batch.failure, calls)

    def answer(self, results: dict[int, str]) -> None:
        """Takes results of calls of tools."""
        if self._batch is not None:
            for number, text in results.items():
                self._batch.answers.pop(number).put(text)

    def close(self) -> None:
        """Cancels the rows of this batch. May be called twice."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None


def open_replica(config: EngineConfig) -> Replica:
    """A replica in a process that serves nothing else. Raises as `Engine` does."""
    engine = Engine(config)
    tune_process()
    return Replica(engine)


class InProcessConnection:
    """A `ReplicaConnection` to an engine of this process, which belongs to somebody else, such as a chat."""

    def __init__(self, engine: Engine) -> None:
        self._replica = Replica(engine)
        self._lock = threading.Lock()
        self._is_over = False

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        with self._lock:
            if self._is_over:
                raise WorkerDied("it was told to end")
            return getattr(self._replica, method)(*arguments)

    def kill(self) -> None:
        """Cancels its rows; the engine goes on."""
        self._is_over = True
        with self._lock:
            self._replica.close()


class EngineLauncher(ReplicaLauncher):
    """The last replica is the engine of a chat; another launcher, if there is one, starts those before it."""

    def __init__(self, engine: Engine, others: ReplicaLauncher | None = None) -> None:
        self._engine, self._others = engine, others
        self.num_replicas = 1 + (others.num_replicas if others is not None else 0)

    def name(self, number: int) -> str:
        return super().name(number) if number < self.num_replicas - 1 else "this chat"

    def start(self, number: int, config: EngineConfig) -> ReplicaConnection:
        if self._others is not None and number < self.num_replicas - 1:
            return self._others.start(number, config)
        return InProcessConnection(self._engine)

    def close(self) -> None:
        if self._others is not None:
            self._others.close()


class _Batch:
    """The rows of one batch, on the engine's thread.

    failure: why the engine has failed, if it has
    """

    def __init__(self, engine: Engine, options: RowOptions) -> None:
        tools = tuple(replace(tool, call=tool.call or partial(self._call, tool.name)) for tool in options.tools)
        lines = LineProcessor.of(engine.core, replace(options, tools=tools))
        self.stream = EngineStream(engine.thread, lines, window=sys.maxsize)
        self.calls: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        self.answers: dict[int, queue.SimpleQueue[str]] = {}
        self._given: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._finished = self.stream.finished(iter(self._given.get, None))
        self._ready: deque[Row] = deque()
        self._enough = max(engine.limits.max_seqs // 2, 1)
        self.failure = ""

    def exchange(self, rows: list[Line], cancelled: list[int], wait_s: float, linger_s: float) -> list[FinishedRow]:
        """Takes and cancels rows. Returns those that have finished, as many as one reply holds."""
        for line in rows:
            self._given.put(line)
        for index in cancelled:
            self.stream.cancel(index)
        self._collect(0.0 if self._ready else wait_s)
        until = time.monotonic() + linger_s
        while 0 < len(self._ready) < self._enough and time.monotonic() < until:
            time.sleep(linger_s / 4)
            self._collect(0.0)
        finished: list[FinishedRow] = []
        size = 0
        while self._ready and len(finished) < MAX_REPLY_ROWS:
            size += len(self._ready[0].data)
            if finished and size > MAX_MESSAGE_BYTES:
                break
            row = self._ready.popleft()
            finished.append((row.index, row.data, row.outcome))
        return finished

    def close(self) -> None:
        self._finished.close()
        self._given.put(None)

    def _call(self, name: str, arguments: dict[str, Any], cancelled: threading.Event) -> str:
        """Lets the driver run a tool."""
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.answers[id(answer)] = answer
        self.calls.put((id(answer), name, json.dumps(arguments)))
        while not cancelled.is_set():
            with suppress(queue.Empty):
                return answer.get(timeout=0.1)
        raise ToolError("cancelled.")

    def _collect(self, wait_s: float) -> None:
        """Formats what the stream gives within this time, but no more than a few replies hold."""
        deadline = time.monotonic() + wait_s
        with suppress(StopIteration):
            while len(self._ready) < MAX_REPLY_ROWS:
                self.stream.poll_s = max(deadline - time.monotonic(), 0.0)
                try:
                    rows = next(self._finished)
                except EngineError as error:
                    self.failure = str(error)
                    return
                self.stream.window.release([row.position for row in rows])
                self._ready.extend(rows)
                if rows or time.monotonic() >= deadline:
                    return
