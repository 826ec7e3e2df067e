"""Who may enter beside those who run: there is to be room now, and likely room until all have ended."""

from __future__ import annotations

import math
from collections import Counter

from cbatch.engine.blocks import BlockPool
from cbatch.engine.forecast import Growth, OutputLengths, peak
from cbatch.engine.request import Request
from cbatch.engine.room import Room

MAX_PREEMPTIONS = 3
"""How often a request is preempted at most, but for what higher priorities and a lack of memory bring about."""

CAUTION = (0.25, 1, 4)
"""What share of the likely growth has to find room, for a request that was preempted never, once, twice.

Less than 1 at first: rows end at different times, and much of a preempted one is found again in the prefix cache,
so that in simulated runs a few preemptions cost less than seats that stay empty.
"""


def age(request: Request) -> tuple[int, int]:
    """The order of requests: priority, then arrival."""
    return request.priority, request.id


class Admission:
    """Decides it, and learns from the outputs that end. Changes neither requests nor blocks."""

    def __init__(self, pool: BlockPool, room: Room) -> None:
        self._pool = pool
        self._room = room
        self._lengths = OutputLengths()

    def learn(self, length: int) -> None:
        """Takes in how many tokens an output had in the end."""
        self._lengths.add(length)

    def make_room(
        self, request: Request, shared: list[int], running: list[Request], max_seqs: int
    ) -> list[Request] | None:
        """Who would have to go so that a request can enter; None where it cannot.

        shared: blocks that it takes over
        """
        free = self._pool.num_free - sum(self._pool.references(block) == 0 for block in shared)
        need = self._pool.blocks_for(request.num_tokens) - len(shared)
        staying = sorted(running, key=age)
        victims: list[Request] = []
        given_up: Counter[int] = Counter()
        while len(staying) >= max_seqs or not self._fits(request, need, free, staying, max_seqs):
            if not staying or staying[-1].priority <= request.priority:
                return None
            victims.append(staying.pop())
            blocks = set(victims[-1].blocks).difference(shared)  # what it takes over does not become free
            given_up.update(blocks)
            free += sum(given_up[block] == self._pool.references(block) for block in blocks)
        return victims

    def _fits(self, request: Request, need: int, free: int, staying: list[Request], max_seqs: int) -> bool:
        """Whether a request can enter beside others (youngest of the lowest priority last), and is likely to stay.

        One block for each of them stays free, so that they do not preempt it straight away. Those of lower priority
        are no reason to wait: they are preempted when it comes to that.
        """
        if free < need + len(staying):
            return False
        if max_seqs * self._pool.blocks_for(self._room.context) <= self._pool.num_blocks:
            return True
        if request.num_preemptions >= MAX_PREEMPTIONS:
            return self._is_safe(request, staying)
        if not staying or staying[-1].priority > request.priority:
            return True
        growing = [self._likely_growth(other, CAUTION[request.num_preemptions]) for other in (*staying, request)]
        return peak(self._pool.num_blocks - free + need, growing, self._pool.block_size) <= self._pool.num_blocks

    def _is_safe(self, request: Request, staying: list[Request]) -> bool:
        """Whether a request and all that go before it find room, whatever lengths they reach."""
        before = [other for other in staying if other.priority <= request.priority]
        held = len(set().union(*(other.blocks for other in before)))
        to_come = sum(self._most_blocks(other) - len(other.blocks) for other in before)
        return held + to_come + self._most_blocks(request) <= self._pool.num_blocks

    def _likely_growth(self, request: Request, share: float) -> Growth:
        left = request.max_new_tokens - request.num_generated
        likely = self._lengths.remaining(request.num_generated, request.max_new_tokens)
        tokens = min(math.ceil(share * likely), left)
        own = self._pool.blocks_for(request.num_tokens) - request.num_cached // self._pool.block_size
        return Growth(tokens, own)

    def _most_blocks(self, request: Request) -> int:
        """Blocks that a request may come to hold; its last token needs no place in the cache."""
        return self._pool.blocks_for(request.num_prompt + max(request.max_new_tokens - 1, 0))
