"""Keeps what libraries print out of what a command writes, and off the screen of a chat."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from cbatch.base.errors import ConfigError

_lock = threading.Lock()
_num_users = 0
_kept = -1


@contextmanager
def without_library_output() -> Iterator[None]:
    """Drops what native code prints on stdout, as tokenizers does for options of tokens that it does not know.

    Whoever writes rows meanwhile has a descriptor of its own, see `own_stdout`. Several threads may be in here.
    """
    global _num_users, _kept
    with _lock:
        if _num_users == 0:
            _flush()
            _kept = os.dup(1)
            with Path(os.devnull).open("wb") as nothing:
                os.dup2(nothing.fileno(), 1)
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0:
                _flush()
                os.dup2(_kept, 1)
                os.close(_kept)


def own_stdout() -> int:
    """A new descriptor of stdout; to be closed. Raises ConfigError if a program has put something else in its place."""
    try:
        return os.dup(sys.stdout.fileno())
    except io.UnsupportedOperation:
        raise ConfigError("Rows cannot go to this stdout, which is no file of the system: name one with -o.") from None


def _flush() -> None:
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()


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
    reader = threading.Thread(target=_read_lines, args=(reading, on_line), name="cbatch-capture", daemon=True)
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


def _read_lines(fd: int, on_line: Callable[[str], None]) -> None:
    """Splits at CR as well, because progress bars write only that between two states."""
    rest = b""
    with os.fdopen(fd, "rb", 0) as pipe:
        while data := pipe.read(65536):
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            for line in lines:
                if line.strip():
                    on_line(line.decode("utf-8", "replace"))
