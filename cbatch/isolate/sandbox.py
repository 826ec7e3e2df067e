"""A worker for what could take for ever, break the interpreter, or fill the memory."""

from __future__ import annotations

import signal
import threading
from typing import Any

from cbatch.isolate.channel import MAX_BYTES
from cbatch.isolate.child import TOO_LARGE, Limits
from cbatch.isolate.worker import Worker, WorkerDied, WorkerFailed

SPARE_SECONDS = 60.0
"""How much longer than it may take a call is waited for: until the process has started, or the system runs it."""


class Sandbox:
    """A worker that the first call starts, and that stays for the next ones. If it dies, the next one starts another.

    Thread-safe.
    """

    def __init__(self, target: str, *arguments: Any, limits: Limits) -> None:
        """For the arguments see `Worker`."""
        self._target = target
        self._arguments = arguments
        self.limits = limits
        self._lock = threading.Lock()
        self.worker: Worker | None = None
        self._is_closed = False

    def call(self, method: str, *arguments: Any, max_bytes: int = MAX_BYTES) -> Any:
        """The result of a method of the object there. Its arguments are pickled, and its result is JSON.

        max_bytes: of the answer

        Raises WorkerFailed for whatever it raises, and WorkerDied if the process does not survive it; OSError if the
        process cannot be started, or has no object.
        """
        with self._lock:
            worker = self.worker
            if worker is None or not worker.is_running():
                worker = self.worker = Worker(self._target, *self._arguments, limits=self.limits)
            if self._is_closed:
                worker.kill()
            try:
                timeout_s = self.limits.wall_seconds + SPARE_SECONDS
                return worker.call(method, *arguments, timeout_s=timeout_s, max_bytes=max_bytes)
            except BaseException as error:
                if isinstance(error, WorkerFailed) and not isinstance(error, WorkerDied):
                    raise
                self.worker = None  # also after Ctrl-C: the answer to this call must not be taken for that to the next
                worker.kill()
                if isinstance(error, WorkerDied):
                    raise WorkerDied(self._reason(error), error.code) from error
                raise

    def close(self) -> None:
        """Ends the process, and with it a call that runs. Nothing can be called any more. May be called twice."""
        self._is_closed = True
        if (worker := self.worker) is not None:
            worker.kill()

    def _reason(self, death: WorkerDied) -> str:
        if death.code == -signal.SIGPROF:
            return f"it does not end within {self.limits.cpu_seconds:g} s"
        if death.code == -signal.SIGALRM:
            return f"it does not end within {self.limits.wall_seconds:g} s"
        return f"{TOO_LARGE}, or breaks the interpreter (its process ended with {death.code})"
