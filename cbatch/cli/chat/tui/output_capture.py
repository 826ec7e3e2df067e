"""While a screen is drawn, whatever else in the process prints goes somewhere else."""

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
    """Gives the terminal behind stdout; what is written to stdout and stderr comes to `on_line` instead.

    `on_line` is called on a thread of its own with each line, of libraries in C too, without its end.
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
        reader.join(1.0)  # a child process may hold the other end for longer


def _read(fd: int, on_line: Callable[[str], None]) -> None:
    """Lines end at CR too: progress bars of libraries write nothing else between two states."""
    rest = b""
    with os.fdopen(fd, "rb", 0) as pipe:
        while data := pipe.read(65536):
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            for line in lines:
                if line.strip():
                    on_line(line.decode("utf-8", "replace"))
