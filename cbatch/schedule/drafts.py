"""Drafts: tokens that a decoding request probably gets next, computed in the same step as its last known one.

A drafted chunk has a row of logits after each of its tokens. What is sampled there is what the request would get anyway
if the draft is right so far; so the request accepts these tokens up to the first that the draft has not foreseen. The
keys and values of rejected tokens lie beyond `num_computed`: the next step overwrites them, and no block that holds
them is cached. A recurrent state goes back to before the draft, and accepted tokens are computed once more
(`recurrent_states`).

Drafts take what a step has left: tokens that no prompt wants, blocks that are free while nothing waits, and rows of
logits up to `max_seqs`, for which memory was measured, or a few more.
"""

from __future__ import annotations

from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.draft_policy import DraftPolicy
from cbatch.schedule.draft_sources import MIN_MATCH, DraftSources, Proposal
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.recurrent_states import RecurrentStates
from cbatch.schedule.sequence import TokenSequence

MIN_ROWS, MIN_ROWS_AUTO = 16, 64
"""Rows of logits that a step with drafts may have, however small `max_seqs` is. `auto` is for CPUs, which have room."""


class NoDrafts:
    """For engines that do not speculate."""

    num_drafted = num_accepted = 0

    def holds_back(self, sequence: TokenSequence) -> bool:
        return False

    def extend(self, scheduled: SchedulerOutput, budget: int, max_rows: int, *, may_allocate: bool) -> None: ...

    def observe_step(self, scheduled: SchedulerOutput, seconds: float | None) -> None: ...

    def observe(self, chunk: ScheduledChunk, accepted: int) -> None: ...

    def forget(self, sequence: TokenSequence) -> None: ...


class Drafts:
    """Adds drafts to scheduled steps.

    num_drafted, num_accepted: tokens, of all steps whose tokens are known
    """

    def __init__(self, pool: BlockPool, states: RecurrentStates, most: int | None) -> None:
        """most: tokens of every draft; None: as many as pay"""
        self._pool = pool
        self._states = states
        self._sources = DraftSources(MIN_MATCH if most is not None else 1)  # where costs count, so do single tokens
        self._policy = DraftPolicy(most, states.replay_weight)
        self._min_rows = self._max_rows = MIN_ROWS if most is not None else MIN_ROWS_AUTO
        self.num_drafted = 0
        self.num_accepted = 0

    def holds_back(self, sequence: TokenSequence) -> bool:
        """Whether a request of the step in flight is to wait for it: only then its draft can be made, or is known.

        It waits only if what is known of it promises a draft.
        """
        if sequence.num_drafted:
            return True
        proposal = self._sources.propose(sequence, 2) if sequence.is_decoding else None
        return proposal is not None and self._policy.is_promising(sequence, proposal)

    def extend(self, scheduled: SchedulerOutput, budget: int, max_rows: int, *, may_allocate: bool) -> None:
        """Adds drafts to the decoding requests of a step.

        budget:       tokens that are left to the step
        max_rows:     most rows of logits that are sampled
        may_allocate: whether drafts may take free blocks
        """
        self._max_rows = max(max_rows, self._min_rows)
        if self._policy.rests(scheduled):
            return
        self._sources.begin_step(scheduled.num_tokens - len(scheduled.chunks))
        for chunk in scheduled.chunks:
            if chunk.stop - chunk.start > 1:
                self._sources.index(chunk.sequence, chunk.stop - chunk.start)  # so that its first drafts are early
        budget = min(budget, self._max_rows - len(scheduled.to_sample))
        if budget <= 0 or not self._policy.looks_beside(scheduled):
            return
        found = self._look(scheduled, budget, may_allocate=may_allocate)
        for number, count in self._policy.counts(scheduled, found, budget).items():
            chunk, tokens = scheduled.chunks[number], found[number].tokens[:count]
            tokens = tokens[: self._room(chunk, may_allocate=may_allocate)]  # others have taken blocks since
            if tokens:
                scheduled.chunks[number] = self._extended(chunk, tokens)

    def _look(self, scheduled: SchedulerOutput, budget: int, *, may_allocate: bool) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        most = min(budget, self._policy.most)
        for number, chunk in enumerate(scheduled.chunks):
            if not self._policy.looks_at(chunk.sequence):
                continue
            if (room := self._room(chunk, may_allocate=may_allocate)) > 0:
                proposal = self._sources.propose(chunk.sequence, min(room, most))
                self._policy.found(chunk.sequence, proposal)
                if proposal is not None:
                    found[number] = proposal
        return found

    def observe_step(self, scheduled: SchedulerOutput, seconds: float | None) -> None:
        """Learns what a completed step cost; None if that is not known."""
        if len(scheduled.chunks) < self._max_rows:  # a full batch has no drafts, whatever they cost
            self._policy.observe_step(scheduled, seconds)

    def observe(self, chunk: ScheduledChunk, accepted: int) -> None:
        """Counts the drafted tokens that a request has accepted."""
        self.num_drafted += len(chunk.draft)
        self.num_accepted += accepted
        self._policy.observe(chunk, accepted)

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a request that has ended; later ones may find its output."""
        self._sources.forget(sequence)
        self._policy.forget(sequence)

    def _room(self, chunk: ScheduledChunk, *, may_allocate: bool) -> int:
        """Most tokens of a draft behind a chunk; 0 if it is not the last known token of a decoding request."""
        sequence = chunk.sequence
        if not chunk.is_decode or chunk.stop != len(sequence.token_ids):
            return 0
        blocks = len(sequence.blocks) + (self._pool.num_free if may_allocate else 0)
        wanted = sequence.request.max_new_tokens - sequence.num_generated - 1
        return min(wanted, blocks * self._pool.block_size - chunk.stop, self._states.draft_room(chunk))

    def _extended(self, chunk: ScheduledChunk, draft: list[int]) -> ScheduledChunk:
        sequence, stop = chunk.sequence, chunk.stop + len(draft)
        state = self._states.before_draft(chunk)
        if state is None and chunk.state is not None:
            return chunk  # no slot is left for the state before the draft
        if (need := self._pool.blocks_for(stop) - len(sequence.blocks)) > 0:
            sequence.blocks += self._pool.allocate(need)
        sequence.num_drafted = len(draft)
        return chunk._replace(stop=stop, draft=tuple(draft), state=state)
