"""Requests of a batch that wait, for tests of their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.batch.feed import beginning_of
from cbatch.batch.row import Row
from cbatch.requests.output_processor import OutputProcessor


def encoded(prompt: int | Sequence[int] = 4, priority: int = 0, **params: Any) -> Request:
    """`prompt`: its tokens, or how many"""
    ids = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return Request(prompt_ids=ids, params=SamplingParams(**params), priority=priority)


def queued(position: int, request: Request | None = None, limit: int = 8, tokens: int = 0) -> Row:
    """A request of the row at a position, whose events nobody reads."""
    request = request or encoded()
    row = Row(position, request.index)
    row.outputs = OutputProcessor(request, None, frozenset())
    row.request = request
    row.limit, row.tokens, row.beginning = limit, tokens, beginning_of(request.prompt_ids)
    return row
