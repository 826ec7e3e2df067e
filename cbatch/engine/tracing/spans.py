"""Names for the phases of a step: they stand in a trace while one is recorded, and cost next to nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

OpenSpan = Callable[[str], AbstractContextManager[object]]

_NOTHING = nullcontext()
_open: OpenSpan | None = None


def span(name: str) -> AbstractContextManager[object]:
    """A context whose time a trace shows under this name, on the thread that is in it."""
    return _NOTHING if _open is None else _open(name)


def record_spans(open_span: OpenSpan | None) -> None:
    """From now on `open_span` makes the contexts of all threads; None makes them empty again."""
    global _open
    _open = open_span
