"""How other threads speak to that of the front end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress


class CallbackQueue:
    """Functions that the front end's thread is to call, in the order in which other threads put them here."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] = lambda: None
        self._is_awake = False
        self._callbacks: deque[Callable[[], None]] = deque()

    def set_wake(self, wake: Callable[[], object]) -> None:
        """`wake` is called by whoever puts something, once until `run_all` begins; and here, where something waits."""
        self._wake = wake
        if self._callbacks:
            wake()

    def put(self, call: Callable[[], None]) -> None:
        self._callbacks.append(call)
        if not self._is_awake:
            self._is_awake = True
            with suppress(RuntimeError):  # of an event loop that has just been closed
                self._wake()

    def run_all(self) -> None:
        self._is_awake = False
        try:
            while self._callbacks:
                self._callbacks.popleft()()
        finally:
            if self._callbacks:  # after one that raised
                self._wake()
