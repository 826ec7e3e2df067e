"""A replica without a model, for actors of a cluster."""

from __future__ import annotations

import os
import time

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, RequestError


class FakeReplica:
    def __init__(self, config: EngineConfig) -> None:
        self.model = config.model

    def echo(self, *arguments: object) -> tuple[object, ...]:
        return arguments

    def settings(self) -> tuple[int, str | None, str | None]:
        return os.getpid(), self.model, os.environ.get("OMP_NUM_THREADS")

    def refuse(self) -> None:
        raise RequestError("invalid_row", "The row is wrong.")

    def break_down(self) -> None:
        raise ZeroDivisionError("something is wrong")

    def die(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(600)


def open_fake(config: EngineConfig) -> FakeReplica:
    """Makes a replica. Raises ConfigError for a model of the name `missing`."""
    if config.model == "missing":
        raise ConfigError("There is no such model.")
    return FakeReplica(config)
