"""Replicas that are no processes: all of them share one engine of the test, and die when they are told to."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.connection import ReplicaLauncher
from cbatch.replicas.replica import InProcessConnection


class InProcessLauncher(ReplicaLauncher):
    """A `ReplicaLauncher` on one engine.

    deaths:  how many more lives of each replica end at an exchange
    lives:   how many each replica has begun
    configs: what they were started with
    """

    def __init__(self, engine: Engine, num_replicas: int, deaths: dict[int, int] | None = None) -> None:
        self.num_replicas = num_replicas
        self.deaths = Counter(deaths or {})
        self.lives: Counter[int] = Counter()
        self.configs: list[EngineConfig] = []
        self.is_closed = False
        self._engine = engine

    def start(self, number: int, config: EngineConfig) -> MortalReplica:
        self.lives[number] += 1
        self.configs.append(config)
        return MortalReplica(self._engine, self, number)

    def close(self) -> None:
        self.is_closed = True


class MortalReplica(InProcessConnection):
    """One life. It ends in the middle of an exchange, with rows in its hands."""

    def __init__(self, engine: Engine, launcher: InProcessLauncher, number: int) -> None:
        super().__init__(engine)
        self._launcher, self._number = launcher, number
        self._is_dead = threading.Event()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method == "exchange" and arguments[0] and self._launcher.deaths[self._number] > 0:
            self._launcher.deaths[self._number] -= 1
            super().call(method, *arguments, timeout_s=timeout_s)
            self._is_dead.set()
        if self._is_dead.is_set():
            raise WorkerDied("the test says so")
        return super().call(method, *arguments, timeout_s=timeout_s)

    def kill(self) -> None:
        self._is_dead.set()
        super().kill()
