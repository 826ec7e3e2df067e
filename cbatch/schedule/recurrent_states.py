"""Scheduling for models with recurrent layers: slots, snapshots, and where prompts are cut.

Snapshots are made where others are likely to go on: at the last block boundary of a prompt, at the latest one of an
output, and at the end of what a prompt has in common with cached blocks or with the requests behind it. A request waits
while an older one is computing a longer beginning of it than any snapshot has.

Prompts are cut at multiples of the length in which the layers work (`chunk_multiple`), counted from the beginning of
the sequence, so that what a request computes does not depend on how much of a step was left to it.

A step with a draft makes a snapshot of the state before the draft. If some of the draft is wrong, the request goes on
in the slot of that snapshot, and computes the accepted tokens again with its next one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from cbatch.schedule.admission import priority_key
from cbatch.schedule.block_pool import UNKNOWN, BlockPool
from cbatch.schedule.output import ScheduledChunk
from cbatch.schedule.sequence import RecurrentState, TokenSequence
from cbatch.schedule.state_slots import ChunkState, Snapshot, StateSlots

LOOK_AHEAD = 4
"""Waiting requests that are compared with one that is admitted."""


class CachedPrefix(NamedTuple):
    """The beginning of a request that need not be computed: its blocks, and the state after them."""

    blocks: list[int]
    snapshot: Snapshot | None


class RecurrentStates:
    """Gives running requests slots, and plans snapshots.

    slots:    may be looked at by anybody. None for a model without recurrent layers: what has pages can be taken over,
              and prompts are cut anywhere
    multiple: where prompts are cut in this step
    replay_weight: about how often an accepted token of a draft is computed
    """

    def __init__(self, slots: StateSlots | None, pool: BlockPool, chunk_multiple: int, *, snapshots: bool) -> None:
        """snapshots: whether any are made"""
        self.slots = slots
        self.chunk_multiple = chunk_multiple
        self.multiple = 1
        self.replay_weight = 1.0 if slots is None else 1.5
        self._pool = pool
        self._snapshots = snapshots
        if slots is not None:
            pool.on_evict = slots.forget

    def begin_step(self, running: Sequence[TokenSequence], room: int) -> None:
        """room: tokens that decoding requests leave to prompts in any case"""
        if self.slots is None:
            return
        self.slots.begin_step()
        self.multiple = self.chunk_multiple if room >= self.chunk_multiple else 1
        for sequence in running:
            state = sequence.state
            if state is not None and state.planned:
                state.planned = [tokens for tokens in state.planned if tokens > sequence.num_computed]

    def allowed(self, sequence: TokenSequence, budget: int) -> int:
        """The tokens of `budget` that a prompt can use: 0 if it is to be cut and does not reach a multiple."""
        if sequence.num_pending <= budget or budget >= self.multiple - sequence.num_computed % self.multiple:
            return budget
        return 0

    def has_room(self) -> bool:
        """Whether there is a slot for another request."""
        return self.slots is None or self.slots.has_room()

    def cached_prefix(
        self, sequence: TokenSequence, blocks: list[int], running: Sequence[TokenSequence]
    ) -> CachedPrefix | None:
        """The cached `blocks` that a request takes over at its beginning; None if it should wait for more."""
        if self.slots is None:
            return CachedPrefix(blocks, None)
        snapshot = self.slots.find(self._pool.contents(blocks))
        tokens = snapshot.tokens if snapshot is not None else 0
        if any(_will_share_more(other, sequence, tokens) for other in running):
            return None
        return CachedPrefix(blocks[: tokens // self._pool.block_size], snapshot)

    def start(
        self, sequence: TokenSequence, prefix: CachedPrefix, cached: int, waiting: Sequence[TokenSequence]
    ) -> None:
        """Gives an admitted request a slot; there is one.

        cached:  blocks at its beginning that are cached
        waiting: the requests behind it
        """
        if self.slots is None:
            return
        slot, source = self.slots.take_with(prefix.snapshot)
        planned: set[int] = set()
        if self._snapshots:
            size = self._pool.block_size
            ends = {(tokens - 1) // size * size for tokens in (sequence.num_prompt, len(sequence.token_ids))}
            ends.add(cached * size)
            ends |= {self._common(sequence, other) for other in waiting[:LOOK_AHEAD]}
            planned = {tokens for tokens in ends if tokens > len(prefix.blocks) * size}
        sequence.state = RecurrentState(slot, source, sorted(planned), [prefix.snapshot] if prefix.snapshot else [])

    def schedule_chunk(self, sequence: TokenSequence, budget: int, *, spare: bool) -> ScheduledChunk:
        """The request's next tokens, as many as `budget` allows, with one snapshot at most.

        spare: whether a snapshot has to leave a slot to a waiting request
        """
        state = sequence.state
        if self.slots is None or state is None:
            return ScheduledChunk.of(sequence, budget)
        start, wanted = sequence.num_computed, sequence.num_tokens
        stop = min(wanted, start + budget)
        if stop < wanted and stop // self.multiple * self.multiple > start:
            stop = stop // self.multiple * self.multiple
        ends = [tokens for tokens in state.planned if start < tokens <= stop]
        if not ends and self._snapshots and stop >= sequence.num_prompt and stop % self._pool.block_size == 0:
            ends = [stop]
        snapshot = self.slots.make(ends[0], spare) if ends else None
        if snapshot is not None:
            state.snapshots.append(snapshot)
            stop = ends[0] if len(ends) > 1 else stop
        source, state.source = state.source, None
        return ScheduledChunk.of(sequence, stop - start, ChunkState(state.slot, state.snapshots, source, snapshot))

    def draft_room(self, chunk: ScheduledChunk) -> int:
        """Most tokens of a draft behind a chunk: up to a block's last but one, since snapshots are made at its end."""
        if self.slots is None:
            return sys.maxsize
        if chunk.state is None or chunk.state.snapshot is not None:
            return 0
        return -(chunk.stop + 1) % self._pool.block_size

    def before_draft(self, chunk: ScheduledChunk) -> ChunkState | None:
        """The state of a chunk that gets a draft, with a snapshot before that; None if there is no slot for it."""
        if self.slots is None or chunk.sequence.state is None or chunk.state is None:
            return None
        snapshot = chunk.sequence.state.undrafted = self.slots.make(chunk.stop)
        if snapshot is None:
            return None
        return chunk.state._replace(snapshot=snapshot)

    def settle_draft(self, chunk: ScheduledChunk, accepted: int) -> None:
        """Goes back to before a draft that was wrong in part."""
        state, sequence = chunk.sequence.state, chunk.sequence
        if self.slots is None or state is None or state.undrafted is None or sequence.blocks is not chunk.blocks:
            return
        snapshot, state.undrafted = state.undrafted, None
        if accepted < len(chunk.draft):
            state.slot, snapshot.slot = snapshot.slot, state.slot
            sequence.num_computed = snapshot.tokens
            sequence.num_to_catch_up = accepted
        self.slots.drop(snapshot)

    def publish(self, sequence: TokenSequence) -> None:
        """Lets others find the request's snapshots after tokens that are known by now."""
        state = sequence.state
        if self.slots is None or state is None:
            return
        known = min(sequence.num_computed, len(sequence.token_ids))
        for snapshot in [one for one in state.snapshots if one.content == UNKNOWN and one.tokens <= known]:
            content = self._pool.contents(sequence.blocks)[snapshot.tokens // self._pool.block_size - 1]
            if not self.slots.publish(snapshot, content if content in self._pool.cached_contents else UNKNOWN):
                state.snapshots.remove(snapshot)
            elif snapshot.tokens > sequence.num_prompt:
                if state.latest is not None and state.latest.used_in < 0:  # it was of no use for others
                    self.slots.drop(state.latest)
                    state.snapshots.remove(state.latest)
                state.latest = snapshot

    def release(self, sequence: TokenSequence) -> None:
        """Takes the slot from a request, and the snapshots that nobody could find."""
        state, sequence.state = sequence.state, None
        if self.slots is not None and state is not None:
            self.slots.give_back(state.slot)
            for snapshot in state.snapshots:
                if snapshot.content == UNKNOWN:
                    self.slots.drop(snapshot)
            if state.undrafted is not None:
                self.slots.drop(state.undrafted)

    def rollback(self, chunk: ScheduledChunk) -> None:
        """Drops the snapshot of a chunk that was not computed."""
        if self.slots is not None and chunk.state is not None and chunk.state.snapshot is not None:
            self.slots.drop(chunk.state.snapshot)

    def evict(self, chunk: ScheduledChunk) -> None:
        """Drops the snapshots of a chunk's request, which may hold NaN, and uncaches what others made of them."""
        if self.slots is None or chunk.state is None:
            return
        for snapshot in chunk.state.snapshots:
            block = self._pool.cached_contents.get(snapshot.content)
            if block is not None:
                self._pool.evict([block])
            self.slots.drop(snapshot)

    def check_integrity(self, running: Sequence[TokenSequence], others: Sequence[TokenSequence]) -> None:
        """Raises AssertionError if an invariant is broken."""
        if self.slots is None:
            return
        states = [sequence.state for sequence in running]
        assert all(state is not None for state in states), "a running request without a slot"
        assert not any(sequence.state for sequence in others), "a slot of a request that does not run"
        self.slots.check_integrity(
            [state.slot for state in states if state is not None], self._pool.cached_contents.keys()
        )

    def _common(self, sequence: TokenSequence, other: TokenSequence) -> int:
        """Tokens of the full blocks with which both begin, without the last token of either."""
        if sequence.cache_kind != other.cache_kind:
            return 0
        first, second, size = sequence.content, other.content, self._pool.block_size
        end = (min(len(first), len(second)) - 1) // size * size
        return next((at for at in range(0, end, size) if first[at : at + size] != second[at : at + size]), end)


def _will_share_more(other: TokenSequence, sequence: TokenSequence, tokens: int) -> bool:
    """Whether an older running request is about to make a snapshot with which `request` begins, after `tokens`."""
    if other.state is None or other.cache_kind != sequence.cache_kind or priority_key(other) > priority_key(sequence):
        return False
    ends = (end for end in other.state.planned if tokens < end <= sequence.num_sharable)
    return any(sequence.content[:end] == other.content[:end] for end in ends)
