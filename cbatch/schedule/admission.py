"""When a waiting request is admitted: there are blocks for it now, and probably until all requests have ended.

The lengths of recent outputs are taken as likely. From them follows the most blocks that all running requests will hold
at any later time, as some of them end while others grow.
(The future peak: "Past-Future Scheduler", Gong et al., ASPLOS '25, https://arxiv.org/abs/2507.10150.)
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import SequenceLimits
from cbatch.schedule.sequence import TokenSequence

HISTORY = 256
PRIOR = 256
"""Tokens that an output is expected to get while no output has ended yet."""


class Growth(NamedTuple):
    """A running request: tokens that it will still get, and blocks that become free when it ends."""

    tokens: int
    blocks: int


class OutputLengths:
    """The lengths of recent outputs, and how many tokens an output will probably still get."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=HISTORY)
        self._sorted: list[int] = []
        self._sums: list[int] | None = None
        """Of the longest, the two longest, and so on."""

    def add(self, length: int) -> None:
        if len(self._recent) == HISTORY:
            self._sorted.remove(self._recent[0])
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def remaining(self, generated: int, limit: int) -> int:
        """Tokens that an output of `generated` tokens will probably still get, up to `limit` in all.

        By the mean of the recent outputs that were longer; if there are none, as many as it has already.
        """
        longer = len(self._sorted) - bisect_right(self._sorted, generated)
        if longer:
            if self._sums is None:
                self._sums = list(accumulate(reversed(self._sorted)))
            likely = -(-self._sums[longer - 1] // longer) - generated
        else:
            likely = max(generated, PRIOR if not self._sorted else 1)
        return max(min(likely, limit - generated), 0)


def projected_peak(used: int, growing: Sequence[Growth], block_size: int) -> int:
    """Most blocks held at once until all requests have ended, if each step gives each request one token.

    used:    blocks held now
    growing: the running requests, fewest tokens first
    """
    most = used
    freed = 0
    left = len(growing)
    for tokens, blocks in growing:
        held = used + left * -(-tokens // block_size) - freed
        most = held if held > most else most
        freed += blocks
        left -= 1
    return most


MAX_PREEMPTIONS = 3
"""How often requests of the same priority preempt a request, unless a higher priority comes in between."""

GROWTH_SHARES = (0.25, 1, 4)
"""The share of the projected growth that must fit, for a request that its peers preempted never, once, twice.

It begins below 1: requests end at different times, and much of a preempted one is still in the prefix cache, so in
simulated runs a few preemptions cost less than empty slots.
"""


def priority_key(sequence: TokenSequence) -> tuple[int, int]:
    """The order of requests: priority, then arrival."""
    return sequence.priority, sequence.id


class AdmissionPolicy:
    """Decides whether a waiting request fits, and learns from the lengths of outputs. Changes no request or block."""

    def __init__(self, pool: BlockPool, limits: SequenceLimits) -> None:
        self._pool = pool
        self._limits = limits
        self.lengths = OutputLengths()
        self._growing: dict[float, list[Growth]] = {}
        """The running requests, shortest growth first, for each share of `GROWTH_SHARES` used in this step."""

    def running_changed(self) -> None:
        """The running requests have changed: a step begins, or a request was preempted."""
        self._growing.clear()

    def admit(self, sequence: TokenSequence) -> None:
        """The request runs now, too."""
        for share, growing in self._growing.items():
            insort(growing, self._projected_growth(sequence, share))

    def find_victims(
        self, sequence: TokenSequence, shared: list[int], running: list[TokenSequence], max_seqs: int
    ) -> list[TokenSequence] | None:
        """The requests to preempt so that a request can be admitted, or None if it has to wait.

        Only requests of lower priority are preempted, the youngest of the lowest first. They are no reason to wait: if
        blocks run out later, they are preempted then. One block for each remaining request stays free, so that they do
        not preempt the new request at once.

        shared: cached blocks that the request takes over
        """
        free = self._pool.num_free - sum(self._pool.ref_count(block) == 0 for block in shared)
        need = self._pool.blocks_for(sequence.num_tokens) - len(shared)
        lower = sorted((other for other in running if other.priority > sequence.priority), key=priority_key)
        num_staying = len(running)
        victims: list[TokenSequence] = []
        given_up: Counter[int] = Counter()
        while num_staying >= max_seqs or free < need + num_staying:
            if not lower:
                return None
            victims.append(lower.pop())
            num_staying -= 1
            blocks = set(victims[-1].blocks).difference(shared)  # what the request takes over does not become free
            given_up.update(blocks)
            free += sum(given_up[block] == self._pool.ref_count(block) for block in blocks)
        if num_staying == 0 or max_seqs * self._pool.blocks_for(self._limits.context) <= self._pool.num_blocks:
            return victims
        if sequence.num_peer_preemptions >= MAX_PREEMPTIONS:
            return victims if self._fits_worst_case(sequence, running) else None
        return victims if lower or self._fits_projected_peak(sequence, need, free, running, victims) else None

    def _fits_projected_peak(
        self, sequence: TokenSequence, need: int, free: int, running: list[TokenSequence], victims: list[TokenSequence]
    ) -> bool:
        """Whether a request fits until all have ended, if outputs get about as long as the recent ones."""
        share = GROWTH_SHARES[sequence.num_peer_preemptions]
        growing = None if victims else self._growing.get(share)
        if growing is None:
            growing = sorted(self._projected_growth(other, share) for other in running if other not in victims)
            if not victims:
                self._growing[share] = growing
        growing = growing.copy()
        insort(growing, self._projected_growth(sequence, share))
        used = self._pool.num_blocks - free + need
        return projected_peak(used, growing, self._pool.block_size) <= self._pool.num_blocks

    def _fits_worst_case(self, sequence: TokenSequence, running: list[TokenSequence]) -> bool:
        """Whether a request and all that go before it fit, even if all of them reach their longest."""
        before = [other for other in running if other.priority <= sequence.priority]
        held = len(set().union(*(other.blocks for other in before)))
        to_come = sum(self._max_blocks(other) - len(other.blocks) for other in before)
        return held + to_come + self._max_blocks(sequence) <= self._pool.num_blocks

    def _projected_growth(self, sequence: TokenSequence, share: float) -> Growth:
        left = sequence.request.max_new_tokens - sequence.num_generated
        likely = self.lengths.remaining(sequence.num_generated, sequence.request.max_new_tokens)
        own = self._pool.blocks_for(sequence.num_tokens) - sequence.num_cached // self._pool.block_size
        return Growth(min(math.ceil(share * likely), left), own)

    def _max_blocks(self, sequence: TokenSequence) -> int:
        """Most blocks that a request may hold; its last token needs no place in the cache."""
        return self._pool.blocks_for(sequence.num_prompt + max(sequence.request.max_new_tokens - 1, 0))
