"""Drafts: tokens that a decoding request probably gets next, computed in the same step as its last known token.

A drafted chunk has a row of logits after each of its tokens. What is sampled there is what the request would get anyway
if the draft is right so far; so the request accepts these tokens up to the first that the draft has not foreseen. The
keys and values of rejected tokens lie beyond `num_computed`: the next step overwrites them, and no block that holds
them is cached.

Drafts take what a step has left: tokens that no prompt wants, blocks that are free while nothing waits, and rows of
logits up to `max_seqs`, for which memory was measured. A request with a recurrent state gets none, because the state
cannot go back to before a rejected token; neither does one with a constraint.
"""

from __future__ import annotations

from cbatch.engine.scheduler.block_pool import BlockPool
from cbatch.engine.scheduler.output import ScheduledChunk, SchedulerOutput
from cbatch.engine.scheduler.request import Request
from cbatch.engine.speculation.drafter import Drafter

MIN_ROWS = 16
"""Rows of logits that a step with drafts may have, however small `max_seqs` is."""


class NoDrafts:
    """For engines that do not speculate."""

    num_drafted = num_accepted = 0

    def holds_back(self, request: Request) -> bool:
        return False

    def extend(self, scheduled: SchedulerOutput, budget: int, max_rows: int, *, may_allocate: bool) -> None: ...

    def observe(self, chunk: ScheduledChunk, accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


class Drafts:
    """Adds drafts to scheduled steps.

    num_drafted, num_accepted: tokens, of all steps whose tokens are known
    """

    def __init__(self, pool: BlockPool, most: int) -> None:
        """most: tokens of a draft"""
        self._pool = pool
        self._most = most
        self._drafters: dict[Request, Drafter] = {}
        self.num_drafted = 0
        self.num_accepted = 0

    def holds_back(self, request: Request) -> bool:
        """Whether a request is to wait for the step in flight, because only then its draft can be made or is known.

        It waits only if what is known of it promises a draft.
        """
        if request.num_drafted:
            return True
        in_flight = request.num_output_placeholders
        return in_flight > 0 and request.is_decoding and bool(self._propose(request, 2))

    def extend(self, scheduled: SchedulerOutput, budget: int, max_rows: int, *, may_allocate: bool) -> None:
        """Adds drafts to the decoding requests of a step.

        budget:       tokens that are left to the step
        max_rows:     most rows of logits that are sampled
        may_allocate: whether drafts may take free blocks
        """
        budget = min(budget, max(max_rows, MIN_ROWS) - len(scheduled.to_sample))
        for number, chunk in enumerate(scheduled.chunks):
            if budget <= 0:
                break
            room = self._room(chunk, may_allocate=may_allocate)
            draft = self._propose(chunk.request, min(room, budget, self._most)) if room > 0 else []
            if draft:
                scheduled.chunks[number] = self._extended(chunk, draft)
                budget -= len(draft)

    def observe(self, chunk: ScheduledChunk, accepted: int) -> None:
        """Counts the drafted tokens that a request has accepted."""
        self.num_drafted += len(chunk.draft)
        self.num_accepted += accepted

    def forget(self, request: Request) -> None:
        """Drops what is kept for a request that has ended."""
        self._drafters.pop(request, None)

    def _propose(self, request: Request, count: int) -> list[int]:
        if request.grammar_state is not None:
            return []
        drafter = self._drafters.get(request)
        if drafter is None:
            drafter = self._drafters[request] = Drafter()
        return drafter.propose(count) if drafter.update(request.token_ids) else []

    def _room(self, chunk: ScheduledChunk, *, may_allocate: bool) -> int:
        """Most tokens of a draft behind a chunk; 0 if it is not the last known token of a decoding request."""
        request = chunk.request
        if not chunk.is_last or chunk.num_tokens != 1 or chunk.stop != len(request.token_ids) or chunk.start == 0:
            return 0
        blocks = len(request.blocks) + (self._pool.num_free if may_allocate else 0)
        wanted = request.max_new_tokens - request.num_generated - 1
        return min(wanted, blocks * self._pool.block_size - chunk.stop)

    def _extended(self, chunk: ScheduledChunk, draft: list[int]) -> ScheduledChunk:
        request, stop = chunk.request, chunk.stop + len(draft)
        if (need := self._pool.blocks_for(stop) - len(request.blocks)) > 0:
            request.blocks += self._pool.allocate(need)
        request.num_drafted = len(draft)
        return chunk._replace(stop=stop, draft=tuple(draft))
