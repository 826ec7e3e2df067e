"""A process that does for this one what could take forever or crash: one request after the other, within limits."""

from __future__ import annotations

import select
import signal
import struct
import subprocess
import weakref
from contextlib import suppress
from typing import IO

from cbatch.base.child_command import child_command

HEADER = struct.Struct("<?Q")
"""Before each answer: whether the request could be met, and the number of bytes that follow."""

WALL_SECONDS = 60
"""For a process that hangs without computing."""

MEMORY = 2 << 30
"""Bytes that the process may take."""


class WorkerProcess:
    """Runs `main` of a module, which reads requests from stdin and writes answers to stdout."""

    def __init__(self, module: str, *arguments: str | int) -> None:
        """Raises OSError if it cannot be started."""
        # In a session of its own, so that Ctrl-C reaches only the parent, which shuts down in an orderly way.
        self._child = subprocess.Popen(
            child_command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.kill = weakref.finalize(self, _kill, self._child)
        """Ends the process."""

    def is_running(self) -> bool:
        return self._child.poll() is None

    def ask(self, request: bytes, most: int) -> tuple[bool, bytes] | None:
        """Whether the request could be met, and the answer.

        most: bytes that the answer may have

        Returns None, and ends the process, if it dies, hangs, or says more; `end` says how.
        """
        answer = self._ask(request, most)
        if answer is None:
            self.kill()
        return answer

    def end(self, cpu_seconds: int, too_large: str) -> str:
        """How the process ended, without a full stop. too_large: what is said of most ends"""
        if self._child.returncode == -signal.SIGPROF:
            return f"it does not end within {cpu_seconds} s"
        return f"{too_large}, or breaks the interpreter (its process ended with {self._child.returncode})"

    def _ask(self, request: bytes, most: int) -> tuple[bool, bytes] | None:
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.flush()
        waiting = select.poll()
        waiting.register(child.stdout, select.POLLIN)
        if not waiting.poll(1000 * WALL_SECONDS):
            return None
        header = _read(child.stdout, HEADER.size)
        if header is None:
            return None
        worked, size = HEADER.unpack(header)
        data = _read(child.stdout, size) if size <= most else None
        return None if data is None else (worked, data)


def _read(file: IO[bytes], size: int) -> bytes | None:
    """So many bytes, or None if there are not so many."""
    data = file.read(size)
    return data if len(data) == size else None


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError), child:  # the pipe may hold data that was not written yet
        child.kill()
