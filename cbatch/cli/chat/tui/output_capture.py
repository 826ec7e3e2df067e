"""Keeps what the rest of the process prints off the screen."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def capture_output(on_line: Callable[[str], None]) -> Iterator[TextIO]:
    """Yields the terminal behind stdout, and sends what is written to stdout and stderr to `on_line` instead.

    `on_line` gets each line without its end, also from libraries in C and from child processes. It is called on a
    thread of its own.
    """
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    for stream in streams:
        stream.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    reading, writing = os.pipe()
    for fd in (1, 2):
        os.dup2(writing, fd)
    os.close(writing)
    reader = threading.Thread(target=_read, args=(reading, on_line), name="cbatch-capture", daemon=True)
    reader.start()
    try:
        with os.fdopen(os.dup(kept[0]), "w", encoding="utf-8", errors="replace") as terminal:
            yield terminal
    finally:
        for stream in streams:
            stream.flush()
        for fd, before in enumerate(kept, start=1):
            os.dup2(before, fd)
            os.close(before)
        reader.join(1.0)  # a child process may keep the other end open for longer


def _read(fd: int, on_line: Callable[[str], None]) -> None:
    """Splits at CR as well, because progress bars write only that between two states."""
    rest = b""
    with os.fdopen(fd, "rb", 0) as pipe:
        while data := pipe.read(65536):
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            for line in lines:
                if line.strip():
                    on_line(line.decode("utf-8", "replace"))
