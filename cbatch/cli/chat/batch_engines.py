"""The engines that compute the batches of a chat: its own one, and replicas beside it if options ask for them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.engine import CbatchError, EngineConfig, ReplicaDied

if TYPE_CHECKING:
    from cbatch.engine import BatchDriver, Engine, Place, ReplicaConnection, ReplicaDriver, ReplicaLauncher


class BatchEngines:
    """Gives a chat what computes its batches.

    The chat's own engine is one of the replicas, and serves replies as well. The others start with the first batch, and
    live until the chat ends.

    config: of the chat's own engine: with its share of the machine
    """

    def __init__(self, config: EngineConfig, options: ReplicaOptions | None = None) -> None:
        """Raises ConfigError if the machine has no room for so many replicas. Call it before torch is imported."""
        self.config = config
        self._shared_config = config
        self._options = options or ReplicaOptions()
        self._others: list[Place] = []
        self._driver: ReplicaDriver | None = None
        if self._options.are_given and self._options.ray is None:
            from cbatch.engine import find_places

            own, *self._others = find_places(config, self._options.wanted)
            self.config = own.applied_to(config)
            os.environ |= own.environment
            if own.cores:
                os.sched_setaffinity(0, own.cores)  # threads that are started from now on have the same

    def driver(self, engine: Engine) -> BatchDriver:
        """What computes a batch. The first one starts the other replicas. Raises ConfigError if they cannot start."""
        from cbatch.engine import TIMEOUT_S, EngineDriver, ReplicaDriver

        if not self._options.are_given:
            return EngineDriver(engine.thread)
        if self._driver is None:
            launcher = WithOwnEngine(engine, self._launch_others())
            timeout_s = self._options.timeout_s or TIMEOUT_S
            self._driver = ReplicaDriver(launcher, self._shared_config, timeout_s=timeout_s)
        return self._driver

    def close(self) -> None:
        """Ends the other replicas. The chat's own engine stays as it is."""
        if self._driver is not None:
            self._driver.close()

    def _launch_others(self) -> ReplicaLauncher:
        options = self._options
        if options.ray is None:
            from cbatch.engine import LocalLauncher

            return LocalLauncher(self._others)
        from cbatch.engine.replicas.ray_cluster import RayLauncher

        others = options.wanted - 1 if options.wanted is not None else None
        return RayLauncher(options.ray, others, options.resources)


class WithOwnEngine:
    """A `ReplicaLauncher` whose last replica is an engine of this process."""

    def __init__(self, engine: Engine, others: ReplicaLauncher) -> None:
        self._engine, self._others = engine, others
        self.num_replicas = others.num_replicas + 1

    def name(self, number: int) -> str:
        return self._others.name(number) if number < self._others.num_replicas else "this chat"

    def start(self, number: int, config: EngineConfig) -> ReplicaConnection:
        if number < self._others.num_replicas:
            return self._others.start(number, config)
        return OwnEngine(self._engine)

    def close(self) -> None:
        self._others.close()


class OwnEngine:
    """A `ReplicaConnection` to an engine of this process. The engine outlives it."""

    def __init__(self, engine: Engine) -> None:
        from cbatch.engine import Replica

        self._engine = engine
        self._replica = Replica(engine)
        self._calling = threading.Lock()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if self._engine.failure is not None:
            raise ReplicaDied(f"its engine has failed: {self._engine.failure}")
        try:
            with self._calling:
                return getattr(self._replica, method)(*arguments)
        except CbatchError:
            raise
        except Exception as error:
            raise ReplicaDied(repr(error)) from error

    def kill(self) -> None:
        """Cancels its rows, after the call that is being answered."""
        with self._calling:
            self._replica.close()
