"""Keeps a replica alive: starts it, lets it serve, and starts it anew when it dies."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError, ConfigError, EngineError, ModelError, in_short
from cbatch.batch.driver import ReplicaStatus
from cbatch.batch.lines import Line
from cbatch.engine.stats import total_stats
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.connection import ReplicaConnection, ReplicaInfo, ReplicaLauncher, Reply

START_TIMEOUT_S = 3600.0
"""How long the first replica may load its model, which it may have to download."""

LOAD_FACTOR = 5.0
"""How many times as long as the first one another replica may load, or one that is started again."""

IDLE_SECONDS = 1.0
"""How often a replica with nothing to do is asked whether it still lives."""

MAX_BACKOFF_S = 60.0
MAX_FUTILE_LIVES, MAX_LIVES_WITHOUT_ROW = 5, 15
"""A replica is given up after so many lives in a row in which it finished no row: not counting, and counting those that
ended while it ran a single row alone, which is then likely to be the reason.
"""

_log = logging.getLogger("cbatch")


class Job(ABC):
    """The common work of replicas, such as the rows of a batch."""

    @abstractmethod
    def run(self, life: Life) -> None:
        """Works with a replica until the job is over, or its driver closes. Called on a thread for each replica.

        Raises WorkerDied if the replica dies meanwhile; what it had is left to others by then.
        """


@dataclass(slots=True)
class SharedState:
    """The state that the threads of a driver share. `lock` guards it, and `changed` tells when it changes.

    launcher, config, timeout_s, backoff_s: see `ReplicaDriver`
    job:        what the replicas work on
    info:       what the first replica that was ready said of itself
    load_s:     seconds from its start to that
    failure:    why no replica will serve any more
    is_closing: whether all replicas are to end
    num_alive:  replicas that have not been given up
    """

    launcher: ReplicaLauncher
    config: EngineConfig
    timeout_s: float
    backoff_s: float
    job: Job | None = None
    info: ReplicaInfo | None = None
    load_s: float | None = None
    failure: CbatchError | None = None
    is_closing: bool = False
    num_alive: int = field(init=False)
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self.num_alive, self.changed = self.launcher.num_replicas, threading.Condition(self.lock)

    def begin(self, job: Job) -> None:
        """Raises EngineError if the replicas work on another one."""
        with self.changed:
            if self.job is not None:
                raise EngineError("The replicas run another batch.")
            self.job = job
            self.changed.notify_all()

    def end(self, job: Job) -> None:
        """The job is over, if it was not before."""
        with self.changed:
            if self.job is job:
                self.job = None
                self.changed.notify_all()

    def fail(self, error: CbatchError) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def give_up(self, problem: str) -> None:
        """One replica less; `problem` says which one and why."""
        with self.changed:
            self.num_alive -= 1
            if not self.num_alive:
                self.fail(EngineError(f"No replica is left: {problem}."))


class Life:
    """A replica from when its model is loaded until it dies.

    num_rows:   rows that it was the first to finish, without those that were written off
    runs_alone: whether all that it has is a row that was there at other deaths
    num_copies: rows that it took although another replica had them
    stats:      the last figures of its engine
    results:    of tools that it has called: a number, and what its model gets
    """

    def __init__(self, number: int, connection: ReplicaConnection, info: ReplicaInfo, timeout_s: float) -> None:
        self.number = number
        self.info = info
        self.num_rows = 0
        self.num_copies = 0
        self.runs_alone = False
        self.stats = total_stats(())
        self.results: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._connection = connection
        self._timeout_s = timeout_s
        self._without_step_s = 0.0
        self._checked_at = time.monotonic()

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises WorkerDied, and the CbatchError that the replica raises."""
        try:
            return self._connection.call(method, *arguments, timeout_s=self._timeout_s)
        except (CbatchError, WorkerDied):
            raise
        except BaseException as unforeseen:  # the others go on, whatever it is
            raise WorkerDied(in_short(unforeseen)) from unforeseen

    def exchange(self, rows: list[Line], cancelled: list[int], wait_s: float, linger_s: float = 0.0) -> Reply:
        """See `Replica.exchange`."""
        reply = self.call("exchange", rows, cancelled, wait_s, linger_s)
        if not isinstance(reply, Reply):
            raise WorkerDied(f"its answer was {type(reply).__name__}")
        if reply.finished or reply.stats.num_steps != self.stats.num_steps:
            self._advance()
        self.stats = reply.stats
        return reply

    def check(self, reply: Reply, num_held: int) -> None:
        """Raises WorkerDied if the replica will not finish the rows that it holds."""
        if reply.failure:
            raise WorkerDied(reply.failure.rstrip("."))
        if not num_held:
            self._advance()
            return
        now = time.monotonic()
        # More than half may be time in which this process was stopped, as by Ctrl-Z.
        self._without_step_s += min(now - self._checked_at, self._timeout_s / 2)
        self._checked_at = now
        if self._without_step_s > self._timeout_s:
            raise WorkerDied(f"its engine made no step for {self._timeout_s:g} s")

    def _advance(self) -> None:
        self._without_step_s = 0.0
        self._checked_at = time.monotonic()


class Supervisor:
    """Runs the lives of one replica, one after the other, on a thread of its own."""

    def __init__(self, number: int, shared: SharedState) -> None:
        self.name = shared.launcher.name(number)
        self._number, self._shared = number, shared
        self._connection: ReplicaConnection | None = None
        self._life: Life | None = None
        self._status = ReplicaStatus(self.name, "starting", total_stats(()))
        """Without the figures of the life that goes on."""
        self._futile_lives = self._lives_without_row = 0
        self.thread = threading.Thread(target=self._run, name=f"cbatch-replica-{number + 1}", daemon=True)

    def kill(self) -> None:
        """Ends the life that goes on, if there is one. Called when the driver closes, on another thread."""
        if (connection := self._connection) is not None:
            with suppress(BaseException):  # the process ends with this one in any case
                connection.kill()

    def status(self) -> ReplicaStatus:
        past, life = self._status, self._life
        if life is None:
            return past
        stats = total_stats([life.stats], [past.stats])
        return replace(past, stats=stats, rows=past.rows + life.num_rows, copies=past.copies + life.num_copies)

    def _run(self) -> None:
        try:
            while not self._shared.is_closing and self._status.state != "gone":
                problem = self._live()
                if problem and not self._shared.is_closing:
                    self._after_death(problem)
        except BaseException as error:  # rows that it had may be in nobody's hands now
            problem = f"cannot be kept alive: {in_short(error)}"
            self._shared.fail(EngineError(f"{self.name} {problem}."))
            self._give_up(problem)

    def _live(self) -> str:
        """One life. Returns why it ended; nothing if there is to be no other."""
        shared = self._shared
        try:
            self._connection = shared.launcher.start(self._number, shared.config)
            if shared.is_closing:  # `kill` may have come before there was a connection
                return ""
            info, load_s = self._load(self._connection)
            with shared.changed:
                shared.info, shared.load_s = first, _ = shared.info or info, shared.load_s or load_s
                shared.changed.notify_all()
            if difference := _difference(info, first):
                self._give_up(difference)
                return ""
            self._life = Life(self._number, self._connection, info, shared.timeout_s)
            self._serve(self._life)
            return ""
        except BaseException as error:
            is_known = isinstance(error, CbatchError | WorkerDied)
            if self._life is not None and not is_known:
                raise
            if self._life is not None or isinstance(error, WorkerDied):
                return f"died: {str(error).rstrip('.')}"
            problem = f"cannot be started: {str(error).rstrip('.') if is_known else in_short(error)}"
            if self._status.state == "starting" and isinstance(error, ConfigError | ModelError):
                shared.fail(error)
                self._give_up(problem)
                return ""
            return problem
        finally:
            self._end_life()

    def _load(self, connection: ReplicaConnection) -> tuple[ReplicaInfo, float]:
        """The message of a replica once it has loaded its model, and the seconds that it took.

        Raises as `connection.call` does, and WorkerDied if it takes too long.
        """
        shared, began = self._shared, time.monotonic()
        has_ended = is_late = False

        def watch() -> None:
            nonlocal is_late
            with shared.changed:
                while not has_ended and (left := began + self._load_limit_s() - time.monotonic()) > 0:
                    shared.changed.wait(left)
                is_late = not has_ended
            if is_late:
                connection.kill()

        threading.Thread(target=watch, name=f"cbatch-loading-{self._number + 1}", daemon=True).start()
        try:
            return connection.call("info", timeout_s=math.inf), time.monotonic() - began
        except WorkerDied:
            if not is_late:
                raise
            first = f", and the first one was ready after {shared.load_s:.1f} s" if shared.load_s is not None else ""
            raise WorkerDied(f"it still loaded its model after {self._load_limit_s():,.0f} s{first}") from None
        finally:
            with shared.changed:
                has_ended = True
                shared.changed.notify_all()

    def _load_limit_s(self) -> float:
        first_s = self._shared.load_s
        return START_TIMEOUT_S if first_s is None else max(LOAD_FACTOR * first_s, self._shared.launcher.least_load_s)

    def _serve(self, life: Life) -> None:
        self._status = replace(self._status, state="running")
        shared, last = self._shared, None
        while not shared.is_closing:
            with shared.changed:
                if shared.job is last:
                    shared.changed.wait(IDLE_SECONDS)
                job = shared.job
            if job is not None and job is not last:
                job.run(life)
            elif job is None and not shared.is_closing:
                life.check(life.exchange([], [], 0.0), num_held=0)
            last = job

    def _end_life(self) -> None:
        life, connection = self._life, self._connection
        if life is not None:
            ended = self.status()
            self._status, self._life = replace(ended, stats=total_stats((), [ended.stats])), None
        if life is not None and life.num_rows:
            self._futile_lives = self._lives_without_row = 0
        else:
            self._lives_without_row += 1
            self._futile_lives += life is None or not life.runs_alone
        if connection is not None:
            connection.kill()
            self._connection = None

    def _after_death(self, problem: str) -> None:
        """Waits until it is time for the next life, unless there is to be none."""
        self._status = replace(self._status, deaths=self._status.deaths + 1, problem=problem)
        if self._futile_lives >= MAX_FUTILE_LIVES or self._lives_without_row >= MAX_LIVES_WITHOUT_ROW:
            self._give_up(f"{problem}; it finished no row in {self._lives_without_row} lives")
            return
        delay = min(self._shared.backoff_s * 2.0 ** max(self._futile_lives - 1, 0), MAX_BACKOFF_S)
        self._status = replace(self._status, state="restarting")
        _log.warning("%s %s; it is started again in %s s", self.name, problem, f"{delay:g}")
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.is_closing, delay)

    def _give_up(self, problem: str) -> None:
        self._status = replace(self._status, state="gone", problem=problem)
        if not self._shared.is_closing and self._shared.failure is None:  # else that is what the user is told
            _log.warning("%s %s; it is not started again", self.name, problem)
        self._shared.give_up(f"{self.name} {problem}")


def _difference(info: ReplicaInfo, first: ReplicaInfo) -> str:
    """Why a replica must not serve, because it would give other rows than the first one; nothing if it may."""
    where = f"on {info.host} (process {info.pid})"
    if info.fingerprint != first.fingerprint:
        return f"{where} has another model, dtype or chat template than the first replica"
    mine, others = info.limits.sequence, first.limits.sequence
    is_small = mine.cache_is_small or others.cache_is_small
    if mine.context == others.context and (mine.cache == others.cache or not is_small):
        return ""
    return (
        f"{where} has room for {mine.cache:,} tokens in its KV cache, and the first replica for {others.cache:,}, "
        f"with a context of {mine.context:,} and {others.context:,}, so that rows could end earlier there; "
        "--kv-blocks makes them equal"
    )
