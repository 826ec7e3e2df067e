"""Replicas in this process, without a model: what the driver of replicas does when they live and die."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.base.config import EngineConfig
from cbatch.base.errors import RequestError
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import RowOutcome
from cbatch.engine.stats import EngineStats, total_stats
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.connection import FinishedRow, ReplicaInfo, ReplicaLauncher, Reply
from cbatch.schedule.limits import EngineLimits

LIMITS = EngineLimits(
    max_seqs=4, max_batch_tokens=64, max_model_len=100, block_size=10, num_blocks=50, kv_bytes_per_token=1
)
INFO = ReplicaInfo("model", LIMITS, {"model": "fake"}, host="here", pid=7)

Dies = Callable[["FakeConnection", str, bool], bool]
"""Whether a connection dies in a call of this method: before it, or (True) with its answer."""


@dataclass(eq=False)
class FakeLauncher(ReplicaLauncher):
    """Starts fake replicas. What is on a line decides what becomes of its row: see `FakeConnection._compute`.

    at_once: rows that a replica finishes in one exchange, in so many seconds
    dies:    kills replicas by chance, or at a certain moment
    info:    what the replica of a number says of itself in this life; may raise
    """

    num_replicas: int = 2
    at_once: int = 4
    step_s: float = 0.0
    dies: Dies = lambda connection, method, after: False
    info: Callable[[int, int], ReplicaInfo] = lambda number, life: INFO
    lives: Counter[int] = field(default_factory=Counter)
    deaths_of_rows: Counter[int] = field(default_factory=Counter)
    connections: list[FakeConnection] = field(default_factory=list)
    is_closed: bool = False

    def start(self, number: int, config: EngineConfig) -> FakeConnection:
        self.lives[number] += 1
        connection = FakeConnection(self, number, self.lives[number])
        self.connections.append(connection)
        return connection

    def close(self) -> None:
        self.is_closed = True

    @property
    def num_deaths(self) -> int:
        return sum(connection.has_died for connection in self.connections)


class FakeConnection:
    """One life of a fake replica. It does what `Replica` does, between calls."""

    def __init__(self, launcher: FakeLauncher, number: int, life: int) -> None:
        self.launcher, self.number, self.life = launcher, number, life
        self.held: dict[int, Line] = {}
        self.most_held = 0
        self.calls: Counter[str] = Counter()
        self.lingered_s: set[float] = set()
        self.has_died = False
        self.killed = threading.Event()
        self._stats = replace(total_stats(()), num_running=1)
        self._batch_tokens = 0

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert not self.has_died, "called after its death"
        self.calls[method] += 1
        try:
            if self.launcher.dies(self, method, False):
                raise WorkerDied("exit code 3")
            answer = getattr(self, f"_{method}")(*arguments)
            if self.launcher.dies(self, method, True):
                raise WorkerDied("exit code 3")
            if self.killed.is_set():
                raise WorkerDied("killed")
        except _NoAnswer:
            self.killed.wait(timeout_s)
            self._die()
            raise WorkerDied(f"no answer for {timeout_s:g} s") from None
        except WorkerDied:
            if method == "exchange":  # those that it was being given
                self.held |= {line.index: line for line in arguments[0]}
            self._die()
            raise
        if method == "exchange" and isinstance(answer, Reply):
            for index, _, _ in answer.finished:
                del self.held[index]
        return answer

    def kill(self) -> None:
        self.killed.set()

    def _die(self) -> None:
        self.has_died = True
        self.launcher.deaths_of_rows.update(self.held.keys())

    def _info(self) -> ReplicaInfo:
        return self.launcher.info(self.number, self.life)

    def _keys(self, options: RowOptions, lines: list[Line]) -> list[str]:
        if options.defaults.seed < 0:
            raise RequestError("invalid_row", "seed must not be negative")
        return [f"key of {line.index}" for line in lines]

    def _begin(self, options: RowOptions) -> None:
        if options.defaults.seed == 13:
            raise RequestError("invalid_row", "seed must not be 13")
        self.held, self._batch_tokens = {}, 0

    def _close(self) -> None:
        self.held = {}

    def _exchange(self, rows: list[Line], cancelled: list[int], wait_s: float, linger_s: float) -> Reply:
        self.lingered_s.add(linger_s)
        self.held |= {line.index: line for line in rows}
        self.most_held = max(self.most_held, len(self.held))
        for index in cancelled:
            self.held.pop(index, None)
        finished = list(self._compute())
        time.sleep(self.launcher.step_s)
        if not finished:
            self.killed.wait(wait_s)
        return Reply(finished, self._stats, self._batch_tokens)

    def _compute(self) -> Iterator[FinishedRow]:
        """The rows that finish in this exchange."""
        for line in list(self.held.values())[: self.launcher.at_once]:
            data = line.data or b""
            if line.failure:
                yield line.index, row_of(line), RowOutcome("internal_error", line.failure)
                continue
            if b"poison" in data:
                raise WorkerDied("killed by signal 9 (Killed)")
            if b"hang" in data and self.life == 1:
                raise _NoAnswer
            if b"slow" in data and self.number == 0:
                continue
            self._batch_tokens += 2
            stats = self._stats
            self._stats = replace(stats, num_steps=stats.num_steps + 1, num_tokens=stats.num_tokens + 2)
            yield line.index, row_of(line), RowOutcome(completion_tokens=2, ttft_s=0.25)

    @property
    def stats(self) -> EngineStats:
        return self._stats


class _NoAnswer(Exception):
    pass


def row_of(line: Line) -> bytes:
    """The row of output of a line."""
    return b"row %d: %s\n" % (line.index, line.data or b"")
