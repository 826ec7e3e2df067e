"""Which of the waiting requests of a batch goes to the engine next.

While the input goes on, the oldest goes first: whatever the order, all slots are busy, and nobody waits longer than
needed for the first results. Once the input has ended, the one with the most work goes first, so that the short ones
fill the slots that the long ones leave. (Longest processing time first: Graham, 1969.)

If the KV cache is too small for all that waits and runs, what a prompt begins with may be gone before it is needed
again. So the requests that begin alike follow each other then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbatch.base.request import EventCallback, Request
from cbatch.requests.output_processor import OutputProcessor

LEAST_BEGINNING = 64
"""Tokens that prompts must have in common at their beginning, so that their requests follow each other."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request of a row, from when it is ready until it has ended.

    position:  of the row in this run
    limit:     most tokens of each output
    tokens:    of its prompt and, probably, its outputs
    beginning: what it has in common with requests that begin alike; None if the prompt is too short for that to matter
    """

    position: int
    request: Request
    on_event: EventCallback
    outputs: OutputProcessor
    limit: int
    tokens: int
    beginning: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.beginning = beginning_of(self.request.prompt_ids)

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def num_outputs(self) -> int:
        return self.request.params.n


def beginning_of(prompt_ids: Sequence[int]) -> int | None:
    """A hash of a prompt's first tokens, as many as the largest power of two that it has; valid in this process."""
    if len(prompt_ids) < LEAST_BEGINNING:
        return None
    return hash(tuple(prompt_ids[: 1 << (len(prompt_ids).bit_length() - 1)]))


class WorkOrder:
    """Requests that wait. Lower priorities go first, whatever else holds."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def first_priority(self) -> int:
        """The priority of the request that goes next."""
        return min(self._queues)

    def add(self, request: QueuedRequest) -> None:
        self._queues.setdefault(request.priority, _Queue()).add(request)
        self._num_waiting += 1

    def take(self, max_turn: int) -> QueuedRequest:
        """Removes the request that goes next.

        max_turn: most requests that begin alike and follow each other; 1 if beginnings are not to matter
        """
        queue = self._queues[self.first_priority]
        request = queue.next(max_turn)
        self._remove(queue, request)
        return request

    def remove(self, request: QueuedRequest) -> bool:
        """Removes a request that is not to be computed; returns whether it was waiting."""
        queue = self._queues.get(request.priority)
        if queue is None or request not in queue:
            return False
        self._remove(queue, request)
        return True

    def sort(self, key: Callable[[QueuedRequest], Any]) -> None:
        """Lets those that wait go by their keys, the largest first, and in their old order if these are equal."""
        for priority, queue in self._queues.items():
            self._queues[priority] = queue.sorted(key)

    def _remove(self, queue: _Queue, request: QueuedRequest) -> None:
        queue.remove(request)
        self._num_waiting -= 1
        if not queue:
            del self._queues[request.priority]


class _Queue:
    """The waiting requests of one priority, in their order; also those of each beginning on their own."""

    def __init__(self) -> None:
        self._all: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._alike: dict[int, OrderedDict[int, QueuedRequest]] = {}
        self._turn: int | None = None
        """The beginning of those that follow each other now."""
        self._in_turn = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: QueuedRequest) -> bool:
        return self._all.get(request.position) is request

    def add(self, request: QueuedRequest) -> None:
        self._all[request.position] = request
        if request.beginning is not None:
            self._alike.setdefault(request.beginning, OrderedDict())[request.position] = request

    def remove(self, request: QueuedRequest) -> None:
        del self._all[request.position]
        if request.beginning is not None:
            alike = self._alike[request.beginning]
            del alike[request.position]
            if not alike:
                del self._alike[request.beginning]

    def next(self, max_turn: int) -> QueuedRequest:
        alike = self._alike.get(self._turn) if self._turn is not None else None
        if alike and self._in_turn < max_turn:
            self._in_turn += 1
            return next(iter(alike.values()))
        first = next(iter(self._all.values()))
        self._turn, self._in_turn = first.beginning, 1
        return first

    def sorted(self, key: Callable[[QueuedRequest], Any]) -> _Queue:
        """The same requests in another order."""
        queue = _Queue()
        for request in sorted(self._all.values(), key=key, reverse=True):  # keeps the order of equal ones
            queue.add(request)
        return queue
