"""The real `cbatch chat` in a pseudo-terminal: types into it and reads its screen."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pexpect
import pyte
from pexpect.fdpexpect import fdspawn

from tests.support.fork_server import ForkServer, Run

PATIENCE = float(os.environ.get("CBATCH_TEST_PATIENCE", "120"))
"""Seconds."""


def write_session(path: Path, user: str, text: str, name: str = "n", **reply: str) -> Path:
    """Saves a session of one message and its reply."""
    turn = {"user": user, "answers": [{"text": text, "state": "stop", **reply}]}
    path.write_text(json.dumps({"cbatch_session": 1, "name": name, "turns": [turn]}))
    return path


class Chat:
    """A chat on a screen of 80 × 24. At the end of the `with` block it is killed if it still runs."""

    def __init__(
        self,
        runs: ForkServer,
        home: Path,
        *arguments: object,
        color: bool = True,
        env: dict[str, str] | None = None,
        wait_for: str = "main>",
    ) -> None:
        """
        home:     where it saves sessions and history
        wait_for: what it shows when it has begun
        """
        self._wait_for = wait_for.encode()
        self._runs, self._arguments = runs, arguments
        self._columns, self._rows = 80, 24
        self._env = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(home), "NO_COLOR": "" if color else "1"}
        self._env |= env or {}
        self.raw = b""

    def __enter__(self) -> Self:
        master, slave = pty.openpty()
        self._master = master
        self.screen = pyte.Screen(self._columns, self._rows)
        self._stream = pyte.ByteStream(self.screen)
        self._child = fdspawn(master, timeout=PATIENCE)
        self._child.delaybeforesend = None
        self._set_size()
        name = os.ttyname(slave)
        self.run: Run = self._runs.start("chat", *self._arguments, stdin=name, stdout=name, stderr=name, env=self._env)
        os.close(slave)
        self.until(lambda: self._wait_for in self.raw or self.run.is_over())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.run.is_over():
            self.run.send(signal.SIGKILL)
        self.run.code()
        os.close(self._master)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """All that the screen shows, on one line, so that wrapped sentences are whole."""
        return " ".join(" ".join(self.lines).split())

    @property
    def input(self) -> str:
        """The input line without its prompt."""
        line = next(line for line in reversed(self.lines) if "> " in f"{line} " and not line.startswith(">"))
        return line.partition(">")[2].strip()

    @property
    def bar(self) -> str:
        """The status bar; empty in the middle of a redraw."""
        return next((line for line in reversed(self.lines) if "[" in line and "]" in line), "")

    @property
    def sessions(self) -> str:
        """The left part of the bar, without how full each context is."""
        names = re.sub(r" \d+%(?=\]| |$)", "", self.bar.partition("   ")[0])
        return " ".join(names.split())

    def wait_for_sessions(self, wanted: str) -> None:
        """Waits until the bar shows these sessions."""
        self.until(lambda: self.sessions == wanted, f"the bar does not show {wanted!r}:")

    def send(self, keys: str, *shown: str, gone: str = "") -> None:
        """Types keys, and waits as `wait` does if something is to be seen then."""
        self._child.send(keys)
        if shown:
            self.wait(*shown, gone=gone)

    def say(self, line: str, *shown: str, gone: str = "") -> None:
        """The same with a line and Enter."""
        self.send(line + "\r", *shown, gone=gone)

    def until(self, is_done: Callable[[], object], what: str = "") -> None:
        """Waits for something that the program does."""
        end = time.monotonic() + PATIENCE
        while not is_done():
            assert time.monotonic() < end, what + "\n" + "\n".join(self.lines)
            self._read(0.05)

    def pump(self, seconds: float = 0.05) -> None:
        """Reads what the program writes for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._read(left)

    def _read(self, timeout_s: float) -> None:
        """Reads what there is, or comes in time."""
        with suppress(pexpect.TIMEOUT, pexpect.EOF, OSError):
            data = self._child.read_nonblocking(65536, timeout=timeout_s)
            self.raw += data
            self._stream.feed(data)

    def wait(self, *texts: str, gone: str = "") -> None:
        """Waits until the screen shows all these texts, and no longer shows `gone`."""

        def is_shown() -> bool:
            has_all = all(text in self.text or text in "".join(self.lines) for text in texts)
            return has_all and not (gone and gone in self.text)

        self.until(is_shown, f"the screen does not show {texts} without {gone!r}:")

    def ask_for_long(self, question: str = "Tell me a story.") -> None:
        """Sends a message, and waits until its reply has begun."""
        self.say(question, "1 running")
        self.until(lambda: " " in self.lines[self.lines.index(f"> {question}") + 2].strip("· "), "no answer begins:")

    def settle(self) -> None:
        """Waits until the screen has not changed for a while."""
        before: list[str] = []
        while before != self.lines:
            before = self.lines
            self.pump(0.3)

    def resize(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._set_size()
        self.screen.resize(rows, columns)
        self.run.send(signal.SIGWINCH)

    def leave(self) -> int:
        """Presses Ctrl-D. Returns the exit code."""
        self.send("\x04")
        return self.ended()

    def ended(self) -> int:
        """Waits for the end. Returns the exit code, which is negative if a signal killed it."""
        self.until(self.run.is_over, "it does not end")
        self.pump(0.1)
        return self.run.code()

    def _set_size(self) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", self._rows, self._columns, 0, 0))
