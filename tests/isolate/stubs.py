"""Code for the processes of tests of sandboxes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import NoReturn


class Stub:
    def __init__(self, *given: object) -> None:
        self.given = list(given)
        self.num_calls = 0

    def echo(self, *arguments: object) -> list[object]:
        self.num_calls += 1
        return [self.num_calls, *self.given, *arguments]

    def fail(self) -> NoReturn:
        raise ValueError("it is wrong")

    def loop(self) -> None:
        re.match(r"(a+)+$", "a" * 60 + "b")

    def sleep(self, seconds: float = 60.0) -> None:
        time.sleep(seconds)

    def fill(self, num_bytes: int) -> int:
        return len(bytes(num_bytes))

    def write(self, num_characters: int) -> str:
        return "é" * num_characters

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def state(self) -> list[object]:
        return [sys.flags.isolated, os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT) == signal.SIG_IGN]

    def open_pickle(self) -> object:
        return {1, 2}


def broken() -> NoReturn:
    raise OSError(5, "no object")
