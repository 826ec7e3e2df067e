"""How long the outputs of a batch probably get, learnt from those that have ended.

A file may hold tasks of several kinds, such as labels of a word and essays. Rows of the same kind mostly have similar
limits and prompts, so lengths are kept apart by these, in powers of two.
"""

from __future__ import annotations

import threading
from collections import Counter

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.schedule.forecast import OutputLengths
from cbatch.schedule.limits import SequenceLimits

LEAST_SAMPLES = 8
"""Outputs of a kind that must have ended before their lengths count."""


def output_limit(limits: SequenceLimits, request: Request) -> int:
    """Most tokens of each output of a request; 0 if its prompt is too long, which the engine refuses."""
    room = max(limits.longest - len(request.prompt_ids), 0)
    return room if request.params.max_tokens is None else min(request.params.max_tokens, room)


def ends_by_limit(params: SamplingParams) -> bool:
    """Whether nothing but its limit ends an output."""
    return params.ignore_eos and not (params.stop or params.stop_token_ids) and params.constraint is None


class OutputForecast:
    """The lengths of recent outputs of each kind. May be used by several threads."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, ...], OutputLengths] = {}
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._unknown = OutputLengths()
        self._lock = threading.Lock()

    def observe(self, request: Request, limit: int, length: int) -> None:
        """An output of a request has ended with `length` tokens of at most `limit`."""
        with self._lock:
            for kind in _kinds(request, limit):
                self._lengths.setdefault(kind, OutputLengths()).add(length)
                self._counts[kind] += 1

    def remaining(self, request: Request, limit: int, generated: int = 0) -> int:
        """Tokens that an output of `generated` tokens will probably still get, up to `limit` in all."""
        if ends_by_limit(request.params):
            return max(limit - generated, 0)
        with self._lock:
            for kind in _kinds(request, limit):
                if self._counts[kind] >= LEAST_SAMPLES:
                    return self._lengths[kind].remaining(generated, limit)
            return self._unknown.remaining(generated, limit)


def _kinds(request: Request, limit: int) -> tuple[tuple[int, ...], ...]:
    """What a request has in common with others, the narrowest kind first."""
    by_limit = limit.bit_length()
    return (by_limit, len(request.prompt_ids).bit_length()), (by_limit,)
