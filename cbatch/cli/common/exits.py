"""How a command ends: its exit codes, and signals.

SIGINT and SIGTERM end a run gracefully; a second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cbatch.base.errors import CbatchError, Interrupted

EXIT_USAGE, EXIT_FATAL, EXIT_PIPE = 2, 3, 141
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UserError(CbatchError):
    """The user typed something that cannot be done. The message says why, in a sentence for the terminal."""


def raise_interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    """A signal handler for when there is nothing to finish. The next signal ends the process at once."""
    for other in SIGNALS:
        signal.signal(other, lambda number, _: os._exit(128 + number))
    raise Interrupted(signum)


@contextmanager
def handle_signals(stop: Callable[[int], None], stop_timeout_s: float | None = None) -> Iterator[None]:
    """Within this context, the first signal calls `stop` with its number; a second one ends the process at once.

    stop_timeout_s: seconds after which Interrupted is raised in the main thread, for a `stop` that others could block
    """
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + signum)
        received.append(signum)
        stop(signum)
        if stop_timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, stop_timeout_s)

    def raise_after_timeout(signum: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(received[0])

    before = [(signum, signal.signal(signum, handle)) for signum in SIGNALS]
    before.append((signal.SIGALRM, signal.signal(signal.SIGALRM, raise_after_timeout)))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before:
            signal.signal(signum, handler)
