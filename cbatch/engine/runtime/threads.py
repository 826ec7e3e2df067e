"""The number of threads that torch and our own kernels use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_outside = threading.local()


def num_threads() -> int:
    """Number of threads for computing, also within `single_threaded`."""
    count: int = getattr(_outside, "count", None) or torch.get_num_threads()
    return count


@contextmanager
def single_threaded() -> Iterator[None]:
    """Keeps torch's operations on the calling thread.

    After a parallel operation, torch's other threads spin for about a millisecond, which takes the cores from our own
    threads.
    """
    _outside.count = before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _outside.count = None
