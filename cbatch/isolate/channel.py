"""Messages between a process and a worker that it has started: each behind its length, over a socket pair."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

MAX_BYTES = 2**32
"""Longest message. A longer one means that something else was written to the socket."""

POLL_SECONDS = 1.0
"""How often a wait asks whether there is still somebody to wait for."""

_LENGTH = struct.Struct("<Q")


class Disconnected(Exception):
    """The other end is gone."""


class InvalidMessage(Exception):
    """Not a message. The text says why, without a full stop."""


class Channel:
    """One end of a socket pair. One thread at a time sends and receives."""

    def __init__(self, end: socket.socket, is_alive: Callable[[], bool] = lambda: True) -> None:
        """
        is_alive: whether the process at the other end is there; a process of its own could keep that end open
        """
        self._end = end
        self._is_alive = is_alive
        self._left_s = 0.0  # how long the wait that goes on may still last

    def send(self, message: bytes, timeout_s: float = math.inf) -> None:
        """Raises Disconnected, and TimeoutError if the other end does not read."""
        self._left_s = timeout_s
        for part in (_LENGTH.pack(len(message)), message):
            left = memoryview(part)
            while left:
                left = left[self._wait_for(self._end.send, left) :]

    def receive(self, timeout_s: float = math.inf, max_bytes: int = MAX_BYTES) -> bytearray:
        """The next message. Raises Disconnected, TimeoutError, and InvalidMessage for one that is too long."""
        self._left_s = timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > max_bytes:
            raise InvalidMessage(f"it would be {length} bytes long")
        return self._read(length)

    def shut(self) -> None:
        """Ends the wait of another thread."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self._wait_for(self._end.recv_into, left)
            if count == 0:
                raise Disconnected
            left = left[count:]
        return data

    def _wait_for(self, operation: Callable[[memoryview], int], part: memoryview) -> int:
        while self._left_s > 0:
            seconds, started = min(self._left_s, POLL_SECONDS), time.monotonic()
            try:
                self._end.settimeout(seconds)
                return operation(part)
            except TimeoutError:
                if not self._is_alive():
                    raise Disconnected from None
            except OSError as error:
                raise Disconnected from error
            finally:
                # What is longer does not count: this process was stopped, and the answer may have come meanwhile.
                self._left_s -= min(time.monotonic() - started, seconds)
        raise TimeoutError
