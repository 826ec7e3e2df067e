"""Decides how many tokens of which requests the next step computes.

Every request has tokens that are not in the KV cache yet, and each step hands out a budget of tokens in one order over
running and waiting requests: priority first, then decoding before prefill. A long prompt takes what is left of the
budget, step by step, or of a smaller limit (`step_time`), and shares that with the prompts after it (`prefill_budget`).
(Iteration-level scheduling: Orca, OSDI '22; chunked prefill: Sarathi-Serve, https://arxiv.org/abs/2403.02310.)

A block counts as cached as soon as the step that fills it is scheduled, because each layer writes the keys and values
of all tokens of a step before any of them is attended to. So a request can be admitted in the same step as the one
whose blocks it shares.

Steps may overlap: a step can be scheduled before the tokens of the previous one are known. So a step counts as computed
when it is scheduled; steps run in the order in which they were scheduled, and a request's next token has its place (a
placeholder) before it is known. That such a token ends its request is noticed one step late, and what that step has
computed for the request is dropped. Its blocks may have a new owner by then, which writes to them in a later step.

When blocks run out, a running request preempts the youngest request of the lowest priority, which may be itself; a
waiting request preempts only lower priorities. A preempted request keeps its tokens, and is computed again later. So
the oldest request of the highest priority is never preempted and always advances.
"""

from __future__ import annotations

import heapq
import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from cbatch.base.outputs import Sample, TokenEvent
from cbatch.schedule.admission import AdmissionPolicy, priority_key
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.drafts import Drafts, NoDrafts
from cbatch.schedule.limits import SequenceLimits, StepLimits
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput, StepResult
from cbatch.schedule.prefill_budget import PrefillBudget, ScheduleKey, schedule_key
from cbatch.schedule.recurrent_states import RecurrentStates
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import StateSlots


class Scheduler:
    """Owns the waiting and running requests and their blocks. Nothing else changes a request."""

    def __init__(
        self,
        pool: BlockPool,
        limits: StepLimits,
        max_model_len: int,
        *,
        prefix_cache: bool = True,
        state_slots: StateSlots | None = None,
        chunk_multiple: int = 1,
        max_scored: int = sys.maxsize,
        speculate: int | Literal["auto", "off"] = "off",
        whole_prompts: bool = False,
    ) -> None:
        """
        whole_prompts:               prompts are not cut into chunks; nothing is generated then
        state_slots, chunk_multiple: of a model with recurrent layers; see `recurrent_states`
        max_scored:                  most positions whose logits score prompts in a step
        speculate:                   see `EngineConfig` and `drafts`
        """
        self.pool = pool
        self.max_batch_tokens = limits.max_batch_tokens
        # With more slots than budget, decoding requests could starve a prefill.
        self.max_seqs = min(limits.max_seqs, limits.max_batch_tokens)
        if state_slots is not None:
            self.max_seqs = min(self.max_seqs, state_slots.num_slots)
        self.states = RecurrentStates(state_slots, pool, chunk_multiple, snapshots=prefix_cache)
        self.drafts: NoDrafts | Drafts = NoDrafts()
        if speculate != "off":
            self.drafts = Drafts(pool, self.states, speculate if speculate != "auto" else None)
        self.sequence_limits = SequenceLimits(max_model_len, pool.capacity)
        self.prefix_cache, self._max_scored, self._whole_prompts = prefix_cache, max_scored, whole_prompts
        self._admission = AdmissionPolicy(pool, self.sequence_limits)
        self._limits = self.max_batch_tokens, self.max_seqs
        self.num_ready: Callable[[TokenSequence, int], int] = lambda sequence, num_tokens: num_tokens
        """How many of its next tokens a request with images can compute, as far as their rows are there."""
        self.prefill_limit: int | None = None
        """Most prompt tokens in a step beside decoding requests that are as urgent; None for no limit."""
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.finishing: set[TokenSequence] = set()
        """Requests that only wait for the last token of a step in flight: they need neither slot nor blocks."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Tokens of the prompts that were computed, and how many of them were cached already."""
        self.num_prefilled_tokens = 0
        """Those that steps have computed, also of prompts that are not whole yet."""
        self.held_back: Counter[str] = Counter(slots=0, cache=0, budget=0, target=0)
        """Steps that left requests waiting, by what was short; `target` is the time of a step."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.finishing)

    def add(self, sequence: TokenSequence) -> None:
        insort(self.waiting, sequence, key=priority_key)

    def resume(self, sequence: TokenSequence, known: Iterable[Sample]) -> list[TokenEvent]:
        """Queues a request that has had tokens before, unless they end it, and returns their events.

        It is then like one that was preempted: its tokens are to be computed again before it gets new ones.
        """
        events: list[TokenEvent] = []
        for sample in known:
            events.append(sequence.accept(sample)._replace(is_known=True))
            if events[-1].finish_reason is not None:
                sequence.has_ended = True
                return events
        self.add(sequence)
        return events

    def cancel(self, sequence: TokenSequence) -> None:
        """Removes a request and frees its blocks. A token that a step in flight gives it is dropped."""
        sequence.has_ended = True
        self.drafts.forget(sequence)
        if sequence.is_running:
            self._free_blocks(sequence)
        elif sequence in self.finishing:
            self.finishing.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> SchedulerOutput:
        """Schedules one step and gives each of its tokens a place in the cache. It counts as computed from now on.

        A preempted request comes later in the order than the one that preempts it, so no chunk is ever taken back.
        """
        scheduled = SchedulerOutput()
        for sequence in [sequence for sequence in self.running if sequence.is_finishing]:
            self._stop_running(sequence)  # this step can use its slot and blocks
        self._admission.running_changed()
        budget, states = self.max_batch_tokens, self.states
        states.begin_step(self.running, budget - self.max_seqs)
        preempted, is_refused, filled = set[TokenSequence](), False, set[int]()
        running = sorted([(schedule_key(sequence), sequence) for sequence in self.running])
        prompts = PrefillBudget(self.prefill_limit, running, states.multiple, self._max_scored)
        order = heapq.merge(running, self._waiting_in_order(preempted)) if self.waiting else running
        for (_, pending, _), sequence in order:
            if budget <= 0:
                break
            allowed = states.allowed(sequence, prompts.allow(sequence, budget)) if pending else budget
            if self._whole_prompts:  # the first one goes even beyond a budget that has shrunk
                count = sequence.num_pending
                allowed = count if count <= budget or not scheduled.chunks else 0
            awaits = sequence.num_output_placeholders > 0 and self._awaits_token(sequence)
            if sequence in preempted or allowed == 0 or awaits:
                continue
            if sequence.is_running:
                preempted.update(self._extend_blocks(sequence))
                if pending and sequence.is_running and self._take_over_blocks(sequence):
                    scheduled.admitted.append(sequence)
            elif sequence is self.waiting[0]:  # else an older request has just been preempted
                preempted.update(self._admit(sequence))
                is_refused = not sequence.is_running
                scheduled.admitted += [] if is_refused else [sequence]
            source, ahead = None, 0
            if pending and sequence.is_running:
                if (source := self._begun_block(sequence)) in filled:
                    continue  # by this step, so that the next one can copy it
                ahead = sequence.num_shared - sequence.num_computed if source is not None else 0
                allowed = prompts.allow_spans(sequence, prompts.allow_scores(sequence, allowed + ahead)) - ahead
            if sequence.is_running and sequence.request.images:
                allowed = states.allowed(sequence, self.num_ready(sequence, allowed))
            if sequence.is_running and allowed > 0:
                if source is not None:
                    self._set_cached(sequence, sequence.num_shared)
                    scheduled.admitted.append(sequence)
                chunk = self._schedule_chunk(sequence, allowed)
                if pending and sequence.num_shared:
                    chunk = chunk._replace(source=source)
                    filled.update(self._cache_begun_block(chunk))
                scheduled.chunks.append(chunk)
                budget -= chunk.stop - chunk.start
                prompts.take(chunk, is_prompt=bool(pending))
        self.drafts.extend(scheduled, prompts.spare(budget), self.max_seqs, may_allocate=not self.waiting)
        if self.waiting:
            full, is_late = len(self.running) >= self.max_seqs, prompts.is_exhausted
            self.held_back["slots" if full else "target" if is_late else "cache" if is_refused else "budget"] += 1
        return scheduled

    def _awaits_token(self, sequence: TokenSequence) -> bool:
        """Whether a request waits for its token of the step in flight: it decides what the request computes next."""
        return (sequence.guide is not None and sequence.guide.awaits_token) or self.drafts.holds_back(sequence)

    def _schedule_chunk(self, sequence: TokenSequence, budget: int) -> ScheduledChunk:
        """The request's next tokens, as many as `budget` allows; they count as computed."""
        will_admit = bool(self.waiting) and len(self.running) < self.max_seqs
        chunk = self.states.schedule_chunk(sequence, budget, spare=will_admit)
        sequence.num_computed = chunk.stop
        sequence.num_output_placeholders += chunk.is_last
        if sequence.num_to_catch_up:
            chunk = chunk._replace(caught_up=min(sequence.num_to_catch_up, chunk.num_tokens))
            sequence.num_to_catch_up -= chunk.caught_up
        self._cache_full_blocks(sequence, chunk.start)
        return chunk

    def _cache_full_blocks(self, sequence: TokenSequence, start: int) -> None:
        """Caches the blocks that are full from token `start` on, as far as their tokens are known."""
        stop, size = min(sequence.num_computed, len(sequence.token_ids)), self.pool.block_size
        if self.prefix_cache and start // size < stop // size:
            self.pool.cache_full_blocks(sequence.blocks, sequence.content, start, stop, sequence.cache_kind)
            self.states.publish(sequence)

    def _cache_begun_block(self, chunk: ScheduledChunk) -> Sequence[int]:
        """Caches the end of what choices share if a chunk computes it, and to copy it spares a block's work at least.

        Returns the block that holds it, if it did.
        """
        sequence, size, end = chunk.sequence, self.pool.block_size, chunk.sequence.num_shared
        if not (chunk.start < end <= chunk.stop) or not self.prefix_cache or sequence.state is not None:
            return ()
        if end % size * (len(sequence.request.tails) - 1) < size:
            return ()
        return [self.pool.cache_begun_block(chunk.blocks, sequence.content, end, sequence.cache_kind)]

    def _begun_block(self, sequence: TokenSequence) -> int | None:
        """A block with all that a choice shares with others, beside the full blocks, if it lacks only that."""
        size, end = self.pool.block_size, sequence.num_shared
        if not (end - end % size <= sequence.num_computed < end) or sequence.state is not None:
            return None
        return self.pool.get_begun_block(sequence.blocks, sequence.content, end, sequence.cache_kind)

    def _set_cached(self, sequence: TokenSequence, tokens: int) -> None:
        """Lets a running prompt go on behind its first `tokens`, which others have computed."""
        if sequence.num_generated == 0 and sequence.num_preemptions == 0:
            sequence.num_cached += tokens - sequence.num_computed
        sequence.num_computed = tokens

    def shrink(self, num_tokens: int) -> bool:
        """Halves the size of steps, from `num_tokens`, which did not fit in memory; False if that is 1."""
        num_tokens = min(num_tokens, self.max_batch_tokens)
        if num_tokens <= 1:
            return False
        self.max_batch_tokens = num_tokens // 2
        self.max_seqs = min(self.max_seqs, self.max_batch_tokens)
        for sequence in sorted(self.running, key=priority_key)[self.max_seqs :]:
            self._preempt(sequence)
        return True

    def grow(self) -> bool:
        """Doubles the size of steps after `shrink`, up to the configured one; True if that is reached."""
        tokens, seqs = self._limits
        self.max_batch_tokens = min(2 * self.max_batch_tokens, tokens)
        self.max_seqs = min(2 * self.max_seqs, seqs, self.max_batch_tokens)
        return (self.max_batch_tokens, self.max_seqs) == self._limits

    def _waiting_in_order(self, preempted: set[TokenSequence]) -> Iterator[tuple[ScheduleKey, TokenSequence]]:
        """Yields the first waiting request until one is not admitted, or has just been preempted."""
        while self.waiting and self.waiting[0] not in preempted:
            head = self.waiting[0]
            yield schedule_key(head), head
            if not head.is_running:
                return

    def update_from_output(self, scheduled: SchedulerOutput, result: StepResult) -> list[TokenEvent]:
        """Updates the requests of a step with its tokens, except those that have ended since it was scheduled."""
        for chunk, scores in zip(scheduled.to_score, result.scores, strict=True):
            chunk.sequence.scored += scores[chunk.sequence.next_to_score - chunk.to_score.start :]
        for chunk, total in zip(scheduled.to_pool, result.sums, strict=True):
            chunk.sequence.pool(chunk.to_pool, total)
        for chunk in scheduled.chunks:
            if chunk.start < (num_prompt := chunk.sequence.num_prompt):
                self.num_prefilled_tokens += min(chunk.stop, num_prompt) - chunk.start
        events, samples = [], iter(result.samples)
        for chunk in scheduled.chunks:
            if not chunk.is_last:
                continue
            pools = bool(chunk.sequence.pooled)
            own = [chunk.sequence.pooling_result] if pools else list(islice(samples, 1 + len(chunk.draft)))
            if own[0].error is not None and own[0].error.code == "nan_logits":
                self.states.evict(chunk)
                self.pool.evict(chunk.blocks)  # their keys and values may be NaN, too
            if not chunk.sequence.has_ended:
                events += self._accept(chunk, own)
        return events

    def _accept(self, chunk: ScheduledChunk, samples: Sequence[Sample]) -> list[TokenEvent]:
        """Replaces a request's placeholder by its token, and adds those after it as far as its draft was right."""
        sequence, known = chunk.sequence, len(chunk.sequence.token_ids)
        sequence.num_output_placeholders -= 1
        sequence.num_drafted = 0
        if sequence.num_generated == 0:
            self.num_prompt_tokens += sequence.num_prompt
            self.num_cached_tokens += sequence.num_cached
        events = [sequence.accept(samples[0])]
        # One that was preempted since has a place for one token only.
        foreseen = chunk.draft if sequence.blocks is chunk.blocks else ()
        for draft, sample in zip(foreseen, samples[1:], strict=False):
            if events[-1].finish_reason is not None or events[-1].token_id != draft or not sequence.may_take(sample):
                break  # an error counts only in a step of its own
            sequence.num_computed += 1
            events.append(sequence.accept(sample))
        if chunk.draft:
            self.drafts.observe(chunk, len(events) - 1)
            self.states.settle_draft(chunk, len(events) - 1)
        while events[-1].finish_reason is None and (token := sequence.forced_token) is not None:
            events.append(sequence.accept(Sample(token)))
            sequence.num_to_catch_up += 1
        if events[-1].finish_reason is not None:
            if events[-1].token_id is not None:
                self._admission.lengths.add(sequence.num_generated)
            self.cancel(sequence)
        else:
            self._cache_full_blocks(sequence, known)
        return events

    def rollback(self, scheduled: SchedulerOutput) -> None:
        """Undoes a step that was not computed: uncaches its blocks, and sends requests back that may rely on them.

        Steps that were scheduled later have to be rolled back too.
        """
        size = self.pool.block_size
        for chunk in scheduled.chunks:
            sequence = chunk.sequence
            self.pool.evict(chunk.blocks[chunk.start // size : self.pool.blocks_for(chunk.stop)])
            sequence.num_output_placeholders -= chunk.is_last
            sequence.num_drafted = 0
            self.states.rollback(chunk)
            if sequence.blocks is chunk.blocks and chunk.state is not None:
                self._stop_running(sequence)  # parts of the step may have changed its state
            elif sequence.blocks is chunk.blocks:
                sequence.num_computed = min(sequence.num_computed, chunk.start)
            elif sequence in self.finishing:
                self.finishing.remove(sequence)
                self.add(sequence)
        for sequence in scheduled.admitted:
            if sequence.is_running:
                self._stop_running(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken; tests call it after every step."""
        self.pool.check_integrity()
        held = Counter(block for sequence in self.running for block in sequence.blocks)
        assert all(self.pool.ref_count(block) == count for block, count in held.items())
        assert len(held) == self.pool.num_used, "a block is used by no request"
        assert all(len(sequence.blocks) == len(set(sequence.blocks)) for sequence in self.running)
        assert not any(sequence.blocks or sequence.num_computed for sequence in self.waiting)
        assert not set(self.running) & set(self.waiting) and len(self.running) <= self.max_seqs
        assert not any(sequence.blocks or sequence in self.waiting for sequence in self.finishing)
        for sequence in self.running:
            assert sequence.num_computed <= len(sequence.blocks) * self.pool.block_size
        self.states.check_integrity(self.running, [*self.waiting, *self.finishing])

    def _admit(self, sequence: TokenSequence) -> list[TokenSequence]:
        """Admits a waiting request with blocks for all its tokens, or leaves it waiting.

        Returns the requests of lower priority that it preempts.
        """
        if len(self.running) >= self.max_seqs and all(other.priority <= sequence.priority for other in self.running):
            return []
        most = sequence.num_sharable if self.prefix_cache else 0
        cached = self.pool.get_cached_blocks(sequence.content, sequence.cache_kind, most)
        prefix = self.states.cached_prefix(sequence, cached, self.running if self.prefix_cache else ())
        if prefix is None:
            return []
        shared = prefix.blocks
        victims = self._admission.find_victims(sequence, shared, self.running, self.max_seqs)
        if victims is None or not (victims or self.states.has_room()):
            return []
        for victim in victims:
            self._preempt(victim)
        self.waiting.remove(sequence)
        self.states.start(sequence, prefix, len(cached), self.waiting)
        self.running.append(sequence)
        sequence.request.started_at = sequence.request.started_at or time.monotonic()
        self.pool.touch(shared)
        sequence.blocks = shared + self.pool.allocate(self.pool.blocks_for(sequence.num_tokens) - len(shared))
        sequence.num_computed = len(shared) * self.pool.block_size
        if sequence.num_generated == 0 and sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed
        self._admission.admit(sequence)
        return victims

    def _take_over_blocks(self, sequence: TokenSequence) -> bool:
        """Lets a running prompt go on behind what another one has computed meanwhile; whether there was anything.

        Prompts that begin alike and are computed in parts overtake each other so, and none computes the same part.
        """
        if not self.prefix_cache or sequence.state is not None:
            return False
        size, own = self.pool.block_size, sequence.blocks
        start = sequence.num_computed // size
        found = self.pool.get_cached_blocks(sequence.content, sequence.cache_kind, sequence.num_sharable, own[:start])
        if not found:
            return False
        stop = start + len(found)
        self.pool.touch(found)
        self.pool.free(own[start:stop])
        sequence.blocks = [*own[:start], *found, *own[stop:]]
        self._set_cached(sequence, stop * size)
        self._admission.running_changed()
        return True

    def _extend_blocks(self, sequence: TokenSequence) -> Sequence[TokenSequence]:
        """Gives a running request blocks for all its tokens. Returns the preempted requests, perhaps itself."""
        need = self.pool.blocks_for(sequence.num_tokens) - len(sequence.blocks)
        if need <= 0:
            return ()
        victims: list[TokenSequence] = []
        while self.pool.num_free < need and sequence not in victims:
            victims.append(max(self.running, key=priority_key))
            victims[-1].num_peer_preemptions += victims[-1].priority == sequence.priority
            self._preempt(victims[-1])
        if sequence not in victims:
            sequence.blocks += self.pool.allocate(need)
        return victims

    def _preempt(self, sequence: TokenSequence) -> None:
        self._stop_running(sequence)
        self._admission.running_changed()
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _stop_running(self, sequence: TokenSequence) -> None:
        """Takes slot and blocks from a request, which waits to be admitted again, or only for its last token."""
        self._free_blocks(sequence)
        sequence.num_computed = 0
        if sequence.is_finishing:
            self.finishing.add(sequence)
        else:
            self.add(sequence)

    def _free_blocks(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_drafted = sequence.num_to_catch_up = 0
        self.states.release(sequence)
