"""Runs a command with bounds on its time and its output."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, NamedTuple

MAX_OUTPUT_BYTES = 2**20
"""Read from each stream of a command at most."""

MAX_ERROR_CHARACTERS = 500

POLL_S = 0.02
"""How long to wait before looking again whether a process has ended."""


class ProcessResult(NamedTuple):
    """The output of a command, up to MAX_OUTPUT_BYTES, and its exit code; None if it did not end in time."""

    out: bytes
    err: bytes
    exit_code: int | None

    @property
    def last_words(self) -> str:
        """The last line of what it wrote to stderr, or else to stdout; its exit code if it wrote nothing."""
        lines = (self.err.strip() or self.out).decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:MAX_ERROR_CHARACTERS] if lines else f"exit code {self.exit_code}"


def run_process(words: Sequence[str], data: bytes, timeout_s: float, cancelled: threading.Event) -> ProcessResult:
    """Runs a command without a shell, and ends whatever it has started. Raises OSError if it cannot be started.

    data:      its stdin
    timeout_s: seconds after which it is killed
    cancelled: kills it when it is set
    """
    with tempfile.TemporaryFile() as given, ThreadPoolExecutor(2) as readers:
        given.write(data)
        given.seek(0)
        process = subprocess.Popen(
            words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        streams = [readers.submit(_read, stream) for stream in (process.stdout, process.stderr)]
        deadline = time.monotonic() + timeout_s
        while process.poll() is None and time.monotonic() <= deadline and not cancelled.wait(POLL_S):
            pass
        has_ended = process.returncode is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also processes that it has left behind
        out, err = (stream.result() for stream in streams)
        process.wait()
    return ProcessResult(out, err, process.returncode if has_ended else None)


def _read(stream: IO[bytes] | None) -> bytes:
    """The output of a process, up to a limit, at which it is told that nobody reads any more."""
    assert stream is not None
    with stream:
        return stream.read(MAX_OUTPUT_BYTES)
