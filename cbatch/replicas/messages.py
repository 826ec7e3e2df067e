"""What a replica and the process that drives it tell each other. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.batch.row import RowOutcome
from cbatch.engine.stats import EngineStats
from cbatch.schedule.limits import EngineLimits

MAX_MESSAGE_BYTES = 16 * 2**20
"""Most bytes of rows in one message, unless it is a single row."""

MAX_REPLY_ROWS = 1024

LINGER_SECONDS, MAX_LINGER_SECONDS = 0.02, 0.4
"""How long a reply waits for more rows after the first one, unless they free half of the slots: short rows share it."""

MAX_REPLIES_PER_S = 1000
"""What the process that drives replicas can take in beside its other work; with many replicas, each lingers longer."""

FinishedRow = tuple[int, bytes, RowOutcome]
"""A finished row: the index of its line, its row of output, and what a run counts of it."""


def linger_s(num_replicas: int) -> float:
    """How long a reply of one of so many replicas lingers."""
    return min(max(num_replicas / MAX_REPLIES_PER_S, LINGER_SECONDS), MAX_LINGER_SECONDS)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica says of itself once it has loaded its model.

    fingerprint: of the model; replicas of a run must agree on it and on `limits.sequence`
    description: what was loaded, as names and values for people
    load_s:      seconds that loading took
    host, pid:   where the replica runs
    """

    fingerprint: str
    limits: EngineLimits
    description: dict[str, str]
    load_s: float
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What a replica answers to an exchange.

    finished:   rows that have finished since the last exchange, perhaps not all of them
    stats:      of its engine
    num_tokens: tokens generated so far for the rows of this batch
    failure:    why its engine has failed, so that it serves nothing any more
    """

    finished: list[FinishedRow]
    stats: EngineStats
    num_tokens: int = 0
    failure: str = ""
