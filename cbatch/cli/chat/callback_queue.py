"""How other threads run something on the front end's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress


class CallbackQueue:
    """Callbacks from other threads, which the front end's thread runs in order."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] = lambda: None
        self._is_awake = False
        self._callbacks: deque[Callable[[], None]] = deque()

    def set_wake(self, wake: Callable[[], object]) -> None:
        """Sets what `put` calls to have `run_all` called; once is enough until that begins."""
        self._wake = wake
        if self._callbacks:
            wake()

    def put(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if not self._is_awake:
            self._is_awake = True
            with suppress(RuntimeError):  # from an event loop that was just closed
                self._wake()

    def run_all(self) -> None:
        self._is_awake = False
        try:
            while self._callbacks:
                self._callbacks.popleft()()
        finally:
            if self._callbacks:  # one of them raised
                self._wake()
