"""Named spans for the phases of a step. A trace shows them; without one they cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

OpenSpan = Callable[[str], AbstractContextManager[object]]

_NOTHING = nullcontext()
_open: OpenSpan | None = None


def span(name: str) -> AbstractContextManager[object]:
    """A context that a trace shows under this name, on the current thread."""
    return _NOTHING if _open is None else _open(name)


def record_spans(open_span: OpenSpan | None) -> None:
    """Makes `span` use `open_span` on all threads from now on; None turns spans off."""
    global _open
    _open = open_span
