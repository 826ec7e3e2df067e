"""How many threads torch's own operations take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_outside = threading.local()


def num_threads() -> int:
    """How many threads computing may take, also within `single_threaded`."""
    count: int = getattr(_outside, "count", None) or torch.get_num_threads()
    return count


@contextmanager
def single_threaded() -> Iterator[None]:
    """Keeps torch's operations on the calling thread.

    When one of its parallel operations is over, its other threads look for more for about a millisecond, and so take
    the processor from threads of ours.
    """
    _outside.count = before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _outside.count = None
