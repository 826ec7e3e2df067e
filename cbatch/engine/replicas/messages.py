"""What a replica and the process that drives it tell each other. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.engine.scheduler.limits import EngineLimits


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
