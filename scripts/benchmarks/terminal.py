"""The real `cbatch chat` on a screen of 80 × 24."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

import pexpect
import pyte

COLUMNS, ROWS = 80, 24


class Terminal:
    """Runs the program until it is closed, and draws what it writes."""

    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {"TERM": "xterm-256color"}
        self._child = pexpect.spawn("cbatch", ["chat", *arguments], dimensions=(ROWS, COLUMNS), env=environment)
        self._child.delaybeforesend = None
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.screen.display).split())

    def send(self, keys: str) -> None:
        self._child.send(keys)

    def submit(self, line: str) -> None:
        self.send(line + "\r")

    def pump(self, seconds: float) -> None:
        """Draws what the program writes next, if it writes something in this time."""
        with suppress(pexpect.TIMEOUT):
            self._stream.feed(self._child.read_nonblocking(65536, timeout=seconds))

    def wait(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Waits until the screen matches. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            if time.monotonic() > end:
                raise TimeoutError(f"no {pattern!r} on the screen:\n" + "\n".join(self.screen.display))
            self.pump(0.1)
        return found

    def close(self) -> None:
        self._child.close(force=True)
