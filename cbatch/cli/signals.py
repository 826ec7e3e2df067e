"""SIGINT and SIGTERM end a run in good order; the second one ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cbatch.cli.exits import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def raise_interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    """A handler for the time in which nothing has to be brought to an end."""
    raise Interrupted(signum)


@contextmanager
def stopping(stop: Callable[[int], None], patience: float | None = None) -> Iterator[None]:
    """While this lasts, the first signal calls `stop` with its number, and the second ends the process at once.

    patience: seconds after which the first one does that too; for a `stop` that others could hold up
    """
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + signum)
        received.append(signum)
        stop(signum)
        if patience is not None:
            timer = threading.Timer(patience, os._exit, (128 + signum,))
            timer.daemon = True
            timer.start()

    before = [signal.signal(signum, handle) for signum in SIGNALS]
    try:
        yield
    finally:
        for signum, handler in zip(SIGNALS, before, strict=True):
            signal.signal(signum, handler)
