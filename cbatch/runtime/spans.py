"""Names for what the engine's thread does, for whoever records where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

OpenSpan = Callable[[str], AbstractContextManager[object]]

_NOTHING = nullcontext()
_open: OpenSpan | None = None


def span(name: str) -> AbstractContextManager[object]:
    """A context that is recorded under this name, if somebody records spans."""
    return _NOTHING if _open is None else _open(name)


def record_spans(open_span: OpenSpan | None) -> None:
    """Makes `span` use `open_span` on all threads from now on; None turns spans off."""
    global _open
    _open = open_span
