"""Keeps what libraries print on stdout out of what a command writes there."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    """A new descriptor of stdout; to be closed."""
    return os.dup(sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
