"""Who may enter beside those who run: there is to be room now, and likely room until all have ended."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter

from cbatch.engine.scheduler.block_pool import BlockPool
from cbatch.engine.scheduler.forecast import Growth, OutputLengths, projected_peak
from cbatch.engine.scheduler.limits import SequenceLimits
from cbatch.engine.scheduler.request import Request

MAX_PREEMPTIONS = 3
"""How often its equals preempt a request at most, where nothing of higher priority comes between them."""

GROWTH_SHARES = (0.25, 1, 4)
"""What share of the likely growth has to find room, for a request that equals preempted never, once, twice.

Less than 1 at first: rows end at different times, and much of a preempted one is found again in the prefix cache,
so that in simulated runs a few preemptions cost less than seats that stay empty.
"""


def priority_key(request: Request) -> tuple[int, int]:
    """The order of requests: priority, then arrival."""
    return request.priority, request.id


class AdmissionPolicy:
    """Decides it, and learns from the outputs that end. Changes neither requests nor blocks."""

    def __init__(self, pool: BlockPool, room: SequenceLimits) -> None:
        self._pool = pool
        self._room = room
        self._lengths = OutputLengths()
        self._growing: dict[float, list[Growth]] = {}
        """Of those who run, shortest first, for each share of the likely growth that was asked about in this step."""

    def observe_length(self, length: int) -> None:
        """Takes in how many tokens an output had in the end."""
        self._lengths.add(length)

    def running_changed(self) -> None:
        """Those who run have grown, or are others: a step begins, or somebody was preempted."""
        self._growing.clear()

    def admit(self, request: Request) -> None:
        """One more runs than before."""
        for share, growing in self._growing.items():
            insort(growing, self._projected_growth(request, share))

    def find_victims(
        self, request: Request, shared: list[int], running: list[Request], max_seqs: int
    ) -> list[Request] | None:
        """Who would have to go so that a request can enter; None where it cannot.

        Those of lower priority go, the youngest of the lowest first, and are no reason to wait: they are preempted
        later where it comes to that. One block for each of the others stays free, so that they do not preempt the
        request straight away.

        shared: blocks that it takes over
        """
        free = self._pool.num_free - sum(self._pool.ref_count(block) == 0 for block in shared)
        need = self._pool.blocks_for(request.num_tokens) - len(shared)
        lower = sorted((other for other in running if other.priority > request.priority), key=priority_key)
        num_staying = len(running)
        victims: list[Request] = []
        given_up: Counter[int] = Counter()
        while num_staying >= max_seqs or free < need + num_staying:
            if not lower:
                return None
            victims.append(lower.pop())
            num_staying -= 1
            blocks = set(victims[-1].blocks).difference(shared)  # what it takes over does not become free
            given_up.update(blocks)
            free += sum(given_up[block] == self._pool.ref_count(block) for block in blocks)
        if num_staying == 0 or max_seqs * self._pool.blocks_for(self._room.context) <= self._pool.num_blocks:
            return victims
        if request.num_peer_preemptions >= MAX_PREEMPTIONS:
            return victims if self._fits_worst_case(request, running) else None
        return victims if lower or self._fits_projected_peak(request, need, free, running, victims) else None

    def _fits_projected_peak(
        self, request: Request, need: int, free: int, running: list[Request], victims: list[Request]
    ) -> bool:
        share = GROWTH_SHARES[request.num_peer_preemptions]
        if victims:
            growing = sorted(self._projected_growth(other, share) for other in running if other not in victims)
        elif share in self._growing:
            growing = self._growing[share].copy()
        else:
            growing = sorted(self._projected_growth(other, share) for other in running)
            self._growing[share] = growing.copy()
        insort(growing, self._projected_growth(request, share))
        return (
            projected_peak(self._pool.num_blocks - free + need, growing, self._pool.block_size) <= self._pool.num_blocks
        )

    def _fits_worst_case(self, request: Request, running: list[Request]) -> bool:
        """Whether a request and all that go before it find room, whatever lengths they reach."""
        before = [other for other in running if other.priority <= request.priority]
        held = len(set().union(*(other.blocks for other in before)))
        to_come = sum(self._max_blocks(other) - len(other.blocks) for other in before)
        return held + to_come + self._max_blocks(request) <= self._pool.num_blocks

    def _projected_growth(self, request: Request, share: float) -> Growth:
        left = request.max_new_tokens - request.num_generated
        likely = self._lengths.remaining(request.num_generated, request.max_new_tokens)
        own = self._pool.blocks_for(request.num_tokens) - request.num_cached // self._pool.block_size
        return Growth(min(math.ceil(share * likely), left), own)

    def _max_blocks(self, request: Request) -> int:
        """Blocks that a request may come to hold; its last token needs no place in the cache."""
        return self._pool.blocks_for(request.num_prompt + max(request.max_new_tokens - 1, 0))
