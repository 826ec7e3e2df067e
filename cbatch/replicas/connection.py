"""How replicas are started, and what they are told and tell; all of it can be pickled.

Processes of this machine and actors of Ray each have a launcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cbatch.base.config import EngineConfig
from cbatch.batch.row import RowOutcome
from cbatch.engine.stats import EngineStats
from cbatch.schedule.limits import EngineLimits

MAX_MESSAGE_BYTES = 16 * 2**20
"""Most bytes of rows in one message, unless it is a single row."""

MAX_REPLY_ROWS = 1024

LINGER_SECONDS, MAX_LINGER_SECONDS = 0.02, 0.4
"""How long a reply waits for more rows after the first one, unless they free half of the slots: short rows share it."""

MAX_REPLIES_PER_S = 1000
"""Replies that the process that drives replicas can take in beside its other work; with many, each lingers longer."""

FinishedRow = tuple[int, bytes, RowOutcome]
"""A finished row: the index of its line, its row of output, and what a run counts of it."""


def linger_s(num_replicas: int) -> float:
    """How long a reply of one of so many replicas lingers."""
    return min(max(num_replicas / MAX_REPLIES_PER_S, LINGER_SECONDS), MAX_LINGER_SECONDS)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica's description once it has loaded its model.

    fingerprint: of the model; replicas of a run must agree on it and on `limits.sequence`
    description: what was loaded, as names and values for people
    host, pid:   where the replica runs
    parts:       what decides the fingerprint, by names for people
    """

    fingerprint: str
    limits: EngineLimits
    description: dict[str, str]
    host: str
    pid: int
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """A replica's answer to an exchange.

    finished:   rows that have finished since the last exchange, perhaps not all of them
    stats:      of its engine
    num_tokens: tokens generated so far for the rows of this batch
    failure:    why its engine has failed, so that it serves nothing any more
    calls:      of tools, which run where they were loaded: a number, the tool's name, and arguments in JSON
    """

    finished: list[FinishedRow]
    stats: EngineStats
    num_tokens: int = 0
    failure: str = ""
    calls: Sequence[tuple[int, str, str]] = ()


class ReplicaConnection(Protocol):
    """One life of a replica."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Calls a method of the `Replica`, and returns what it returns. One thread calls at a time.

        The first call waits until the model is loaded, if it is not yet. `timeout_s` may be infinite.

        Raises WorkerDied if there is no answer for any reason, among them `kill` on another thread meanwhile; and the
        CbatchError that the replica raised, while it loaded or in the method. After WorkerDied nothing is called any
        more but `kill`.
        """

    def kill(self) -> None:
        """Ends this life at once, without grace. Returns when it holds no memory and no device any more.

        May be called on any thread, also while another one waits in `call`, and twice.
        """


class ReplicaLauncher(ABC):
    """Starts replicas, whose numbers go from 0 on.

    num_replicas: how many there are to be
    least_load_s: how long each may load its model at least, however soon the first one was ready
    """

    num_replicas: int
    least_load_s = 60.0

    def name(self, number: int) -> str:
        """The replica's name for people, such as `replica 2`."""
        return f"replica {number + 1}"

    @abstractmethod
    def start(self, number: int, config: EngineConfig) -> ReplicaConnection:
        """Begins a life of a replica, and returns without waiting for its model. Called on several threads at once.

        Raises WorkerDied if the replica cannot even be started now, and CbatchError if it never can.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends all that was started and still lives, and frees what the launcher holds. May be called twice."""
