"""How many threads torch's own operations take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch's operations on the calling thread.

    When one of its parallel operations is over, its other threads look for more for about a millisecond, and so take
    the processor from threads of ours.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
