"""Replicas in processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from cbatch.base.config import EngineConfig
from cbatch.isolate.worker import Worker, WorkerDied
from cbatch.replicas.placement import Place

FACTORY = "cbatch.replicas.replica:open_replica"


class LocalLauncher:
    """Starts replicas as processes of this machine, each in a place of its own."""

    def __init__(self, places: Sequence[Place], factory: str = FACTORY) -> None:
        """
        factory: `module:function` that makes what is called in the process, of an EngineConfig
        """
        self.num_replicas = len(places)
        self._places = places
        self._factory = factory
        self._connections: list[Worker] = []
        self._is_closed = False
        # Linux kills a child at the end of the thread that has started it, so it is a thread that stays.
        self._starter = ThreadPoolExecutor(1, "cbatch-starter")

    def name(self, number: int) -> str:
        return f"replica {number + 1}"

    def start(self, number: int, config: EngineConfig) -> Worker:
        """Begins a life of a replica. Raises WorkerDied if its process cannot be started."""
        try:
            starting = self._starter.submit(self._start, number, config)
        except RuntimeError:
            raise WorkerDied("its launcher was closed") from None
        try:
            return starting.result()
        except OSError as error:
            raise WorkerDied(f"its process could not be started: {error}") from error

    def close(self) -> None:
        """Kills all processes, and returns when they are gone. None can be started any more."""
        with suppress(RuntimeError):  # it is closed
            self._starter.submit(self._kill_all).result()
        self._starter.shutdown()

    def _start(self, number: int, config: EngineConfig) -> Worker:
        if self._is_closed:
            raise WorkerDied("its launcher was closed")
        place = self._places[number]
        connection = Worker(
            self._factory,
            place.applied_to(config),
            name=self.name(number),
            cores=place.cores,
            environment=place.environment,
        )
        self._connections = [one for one in self._connections if one.is_running()] + [connection]
        return connection

    def _kill_all(self) -> None:
        self._is_closed = True
        for connection in self._connections:
            connection.send_kill()
        for connection in self._connections:
            connection.kill()
