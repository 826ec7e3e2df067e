"""The engines that compute the batches of a chat: its own one, and replicas beside it if options ask for them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.base.config import EngineConfig
from cbatch.cli.common.replica_options import ReplicaOptions

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.batch.driver import BatchDriver
    from cbatch.replicas.driver import ReplicaDriver
    from cbatch.replicas.launcher import ReplicaLauncher
    from cbatch.replicas.placement import Place


class BatchEngines:
    """Gives a chat what computes its batches.

    The chat's own engine is one of the replicas, and serves replies as well. The others start with the first batch, and
    live until the chat ends.

    config: of the chat's own engine: with its share of the machine
    """

    def __init__(self, config: EngineConfig, options: ReplicaOptions | None = None) -> None:
        """Raises ConfigError if the machine has no room for so many replicas. Call it before torch is imported."""
        self.config = config
        # Nobody waits for the next token of a row, so the others need no short steps.
        self._shared_config = replace(config, target_step_ms=None) if config.target_step_ms == "auto" else config
        self._options = options or ReplicaOptions()
        self._others: list[Place] = []
        self._driver: ReplicaDriver | None = None
        if self._options.are_given and self._options.ray is None:
            from cbatch.replicas.placement import find_places

            own, *self._others = find_places(config, self._options.wanted)
            self.config = own.applied_to(config)
            os.environ |= own.environment
            if own.cores:
                os.sched_setaffinity(0, own.cores)  # threads that are started from now on have the same

    def driver(self, engine: Engine) -> BatchDriver:
        """What computes a batch. The first one starts the other replicas, as does one after they could not be started.

        Raises ConfigError if they cannot be started.
        """
        from cbatch.batch.engine_driver import EngineDriver
        from cbatch.replicas.driver import TIMEOUT_S, ReplicaDriver
        from cbatch.replicas.replica import EngineLauncher

        if not self._options.are_given:
            return EngineDriver(engine.thread)
        if self._driver is not None and self._driver.has_failed:
            self._driver.close()
            self._driver = None
        if self._driver is None:
            launcher = EngineLauncher(engine, self._launch_others(), name="this chat")
            timeout_s = self._options.replica_timeout or TIMEOUT_S
            self._driver = ReplicaDriver(launcher, self._shared_config, timeout_s=timeout_s)
        return self._driver

    def close(self) -> None:
        """Ends the other replicas. The chat's own engine stays as it is."""
        if self._driver is not None:
            self._driver.close()

    def _launch_others(self) -> ReplicaLauncher | None:
        options = self._options
        if options.wanted == 1:
            return None
        if options.ray is None:
            from cbatch.replicas.process import LocalLauncher

            return LocalLauncher(self._others)
        from cbatch.replicas.ray_cluster import RayLauncher

        others = options.wanted - 1 if options.wanted is not None else None
        return RayLauncher(options.ray, others, options.ray_resources)
