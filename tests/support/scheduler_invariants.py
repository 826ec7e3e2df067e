"""What must be true of the scheduler's steps and of its bookkeeping, stated without its algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from cbatch.schedule.admission import priority_key
from cbatch.schedule.output import SchedulerOutput
from cbatch.schedule.recurrent_states import RecurrentStates
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence


class Violation(AssertionError):
    """An invariant is broken."""


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Violation(otherwise)


@dataclass(frozen=True, slots=True)
class StateBefore:
    """The state before a step, of the requests that need more than the tokens in flight.

    first:    the request that has to advance in any case
    running:  the running requests; `decoding` those of them that were decoding
    computed: number of computed or scheduled tokens of each
    excused:  requests that need not advance as long as others run, and neither do those that wait after them
    """

    first: TokenSequence | None
    running: frozenset[TokenSequence]
    decoding: tuple[TokenSequence, ...]
    computed: dict[TokenSequence, int]
    excused: frozenset[TokenSequence]

    @classmethod
    def of(cls, scheduler: Scheduler, excused: Collection[TokenSequence] = ()) -> StateBefore:
        running = [sequence for sequence in scheduler.running if not sequence.is_finishing]
        unfinished = running + [sequence for sequence in scheduler.waiting if not sequence.is_finishing]
        competing = unfinished
        if running and (held := [priority_key(sequence) for sequence in scheduler.waiting if sequence in excused]):
            competing = [
                sequence for sequence in unfinished if sequence.is_running or priority_key(sequence) < min(held)
            ]
        first = min(competing, key=priority_key, default=None)
        decoding = tuple(sequence for sequence in running if sequence.is_decoding)
        computed = {sequence: sequence.num_computed for sequence in running}
        return cls(first, frozenset(running), decoding, computed, frozenset(excused))


def check_scheduled(scheduler: Scheduler, scheduled: SchedulerOutput, before: StateBefore) -> None:
    """Checks limits, chunks, progress and order of one step, before it is computed."""
    sequences = [chunk.sequence for chunk in scheduled.chunks]
    planned, admitted = set(sequences), set(scheduled.admitted)
    require(len(sequences) == len(planned) <= scheduler.max_seqs, "more chunks than slots, or two for one request")
    require(scheduled.num_tokens <= scheduler.max_batch_tokens, "more tokens than a step may have")
    require(planned <= set(scheduler.running), "a chunk of a request that does not run")
    require(admitted == planned - before.running, "the admitted requests are not those that did not run before")
    for chunk in scheduled.chunks:
        sequence, end = chunk.sequence, chunk.stop
        wanted = sequence.num_tokens - chunk.is_last  # the placeholder of this step's token
        require(before.computed.get(sequence, chunk.start) == chunk.start < end <= wanted, "a chunk that does not fit")
        require(sequence.num_computed == end, "a chunk that does not count as computed")
        require(chunk.is_last == (end == wanted), "a wrong is_last")
        require(
            sequence.num_generated + sequence.num_output_placeholders <= sequence.request.max_new_tokens,
            "a token too many is coming",
        )
        require(end <= len(sequence.blocks) * scheduler.pool.block_size, "a token that has no place in the cache")
    first = before.first
    if first is not None and not any(
        priority_key(sequence) < priority_key(first) for sequence in admitted & before.excused
    ):
        require(first in planned, "the oldest of the highest priority does not advance")
    is_spent = _check_prefill_limit(scheduler, scheduled, before)
    if isinstance(scheduler.states, RecurrentStates):
        _check_cuts(scheduler, scheduled)
    elif scheduled.num_tokens < scheduler.max_batch_tokens and not is_spent:
        whole = {chunk.sequence for chunk in scheduled.chunks if chunk.is_last}
        require(whole == set(scheduler.running), "budget is left, and a request did not get all it needs")
    if not isinstance(scheduler.states, RecurrentStates):
        _check_oldest_prompts(scheduled, before)
    for sequence in before.decoding:
        if sequence.is_running and sequence not in planned:
            _check_passed_over(scheduler, scheduled, sequence)


def _check_cuts(scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
    """Prompts of a model with recurrent layers are cut at multiples, or where a snapshot is made."""
    assert isinstance(scheduler.states, RecurrentStates)
    multiple = scheduler.states.chunk_multiple
    if scheduler.max_batch_tokens - scheduler.max_seqs < multiple:
        return
    for chunk in scheduled.chunks:
        is_snapshot = chunk.state is not None and chunk.state.snapshot is not None
        require(chunk.is_last or is_snapshot or chunk.stop % multiple == 0, f"a prompt that is cut at {chunk.stop}")


def _check_prefill_limit(scheduler: Scheduler, scheduled: SchedulerOutput, before: StateBefore) -> bool:
    """Whether prompts use the whole limit. It applies to those that are not more urgent than a decoding request."""
    limit, decoding = scheduler.prefill_limit, set(before.decoding)
    rows = [chunk.sequence.priority for chunk in scheduled.chunks if chunk.sequence in decoding]
    prompts = [chunk for chunk in scheduled.chunks if chunk.sequence not in decoding]
    if limit is None or not rows:
        return False
    if isinstance(scheduler.states, RecurrentStates):
        limit = max(limit, scheduler.states.chunk_multiple)
    total = sum(chunk.num_tokens for chunk in prompts)
    limited = any(chunk.sequence.priority >= min(rows) for chunk in prompts)
    require(not limited or total <= limit, f"{total} tokens of prompts beside decoding requests, {limit} are allowed")
    return total >= limit


def _check_oldest_prompts(scheduled: SchedulerOutput, before: StateBefore) -> None:
    """The oldest running prompt of a priority gets all it needs, or as much as all younger ones in sum."""
    prompts = before.running.difference(before.decoding)
    counts = {chunk.sequence: chunk.num_tokens for chunk in scheduled.chunks if chunk.sequence not in before.decoding}
    whole = {chunk.sequence for chunk in scheduled.chunks if chunk.is_last}
    for oldest in prompts & counts.keys() - whole:
        rivals = [r for r in {*prompts, *counts} if r.priority == oldest.priority]
        if not any(r.id < oldest.id and r in prompts for r in rivals):
            younger = sum(counts.get(r, 0) for r in rivals if r.id > oldest.id)
            require(
                counts[oldest] >= younger, f"prompt {oldest.id} got {counts[oldest]} tokens, younger ones {younger}"
            )


def _check_passed_over(scheduler: Scheduler, scheduled: SchedulerOutput, sequence: TokenSequence) -> None:
    """A decoding request gets no token only if higher priorities, and older requests of its own, took all of them."""
    higher = sum(chunk.num_tokens for chunk in scheduled.chunks if chunk.sequence.priority < sequence.priority)
    beside = [s for s in scheduled.chunks if s.sequence.priority == sequence.priority and s.sequence.id < sequence.id]
    taken = higher + sum(chunk.num_tokens for chunk in beside if chunk.num_tokens == 1)
    require(
        higher > 0 and taken == scheduler.max_batch_tokens, f"request {sequence.id} is decoding and was passed over"
    )


def check_between_steps(scheduler: Scheduler, live: Collection[TokenSequence]) -> None:
    """Every live request is in one place, every block is free or held, and blocks to be written have one owner."""
    scheduler.check_integrity()
    pool, running, waiting, finishing = scheduler.pool, scheduler.running, scheduler.waiting, scheduler.finishing
    require(len(running) + len(waiting) + len(finishing) == len(live), "a request is in two places, or in none")
    require({*running, *waiting, *finishing} == set(live), "a request is lost, or is there and should not be")
    require(all(sequence.is_finishing for sequence in finishing), "a finishing request needs more tokens")
    require(len(running) <= scheduler.max_seqs, "more requests run than there are slots")
    held = Counter(block for sequence in running for block in sequence.blocks)
    references = {block: count for block in range(pool.num_blocks) if (count := pool.ref_count(block))}
    require(references == held, "references differ from who holds the blocks")
    require(pool.num_free + len(held) == pool.num_blocks, "free and held blocks are not all blocks")
    for sequence in running:
        require(0 < sequence.num_computed < sequence.num_tokens, "nothing computed, or nothing left to compute")
        for block in sequence.blocks[sequence.num_computed // pool.block_size :]:
            require(held[block] == 1, f"block {block} will be written and has two owners")
