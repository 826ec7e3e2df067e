"""SIGINT and SIGTERM end a run in good order; the second one ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cbatch.cli.common.exits import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def raise_interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    """A handler for the time in which nothing has to be brought to an end; the next signal ends the process."""
    for other in SIGNALS:
        signal.signal(other, lambda number, _: os._exit(128 + number))
    raise Interrupted(signum)


@contextmanager
def handle_signals(stop: Callable[[int], None], stop_timeout_s: float | None = None) -> Iterator[None]:
    """While this lasts, the first signal calls `stop` with its number, and the second ends the process at once.

    patience: seconds after which Interrupted is raised wherever the main thread is; for a `stop` that others could
              hold up
    """
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + signum)
        received.append(signum)
        stop(signum)
        if stop_timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, stop_timeout_s)

    def lose_patience(signum: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(received[0])

    before = [(signum, signal.signal(signum, handle)) for signum in SIGNALS]
    before.append((signal.SIGALRM, signal.signal(signal.SIGALRM, lose_patience)))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before:
            signal.signal(signum, handler)
