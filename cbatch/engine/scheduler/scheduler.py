"""Who computes how many tokens in the next step.

There is no prefill phase and no decode phase. Every request has tokens that are not in the cache yet; each
step has a budget of tokens, and hands it out in one order over running and waiting requests: priority,
then decoding before prefill. A long prompt takes what is left of the budget in every step (chunked prefill), or of
a limit below it (`pace`), and shares that with those behind it (`shares`). A finished request leaves at once, and a
waiting one may enter at any step.
(Iteration-level scheduling: Orca, OSDI '22; chunked prefill: Sarathi-Serve, https://arxiv.org/abs/2403.02310.)

Prompts that begin alike are computed once: a block counts as there as soon as the step that fills it is planned,
since the keys and values of all tokens of a step are written, layer by layer, before any of them is attended to.
So a request can enter beside the one whose blocks it shares.

The engine may plan a step before it knows what the one before has given. So a step counts as computed when it is
planned: steps happen in the order of their plans, and a request's next token has its place before it is known. What
such a token may end is noticed one step late; what that step has computed for it is dropped. Blocks may change hands
meanwhile, for whoever gets them writes to them in a later step.

When blocks run out, a running request preempts the youngest of the lowest priority, itself if need be; a
waiting one preempts only lower priorities. A preempted request loses its blocks, keeps its tokens, and is
computed again later. So the oldest request of the highest priority is never preempted, and always advances.
A request enters when all that run are likely to find room until they end, so that this is rare; one that was
preempted by its equals enters more cautiously each time, and after the third time only when none of them can do it
again.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence

from cbatch.engine.base.errors import ConfigError
from cbatch.engine.base.outputs import Sample, TokenEvent
from cbatch.engine.scheduler.admission import AdmissionPolicy, priority_key
from cbatch.engine.scheduler.block_pool import BlockPool
from cbatch.engine.scheduler.limits import SequenceLimits
from cbatch.engine.scheduler.output import ScheduledChunk, SchedulerOutput, StepResult
from cbatch.engine.scheduler.prefill_budget import PrefillBudget, ScheduleKey, schedule_key
from cbatch.engine.scheduler.request import Request


class Scheduler:
    """Owns the waiting and running requests and their blocks. Nothing else changes a request."""

    def __init__(
        self,
        pool: BlockPool,
        max_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        *,
        prefix_cache: bool = True,
    ) -> None:
        if max_seqs < 1 or max_batch_tokens < 1:
            raise ConfigError("max_seqs and max_batch_tokens must be at least 1.")
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        # With more seats than budget, decoding requests could leave a prefill no token, for ever.
        self.max_seqs = min(max_seqs, max_batch_tokens)
        self.sequence_limits = SequenceLimits(max_model_len, pool.capacity)
        self.prefix_cache = prefix_cache
        self._admission = AdmissionPolicy(pool, self.sequence_limits)
        self._limits = self.max_batch_tokens, self.max_seqs
        self.prefill_limit: int | None = None
        """Most tokens of prompts in a step beside rows that decode and are as urgent."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finishing: set[Request] = set()
        """Those whose last token is coming: they need neither seat nor blocks any more."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Tokens of the prompts that were computed, and those of them that were in the cache already."""
        self.held_back: Counter[str] = Counter(slots=0, cache=0, budget=0, target=0)
        """Steps that left requests waiting, by what was short: `slots`, `cache`, `budget` or the time of `target`."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.finishing)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=priority_key)

    def cancel(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its blocks. What a step in flight gives it is dropped."""
        request.has_ended = True
        if request.is_running:
            self._free_blocks(request)
        elif request in self.finishing:
            self.finishing.remove(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> SchedulerOutput:
        """Plans one step and gives every planned token its place in the cache. It counts as computed from now on.

        Whoever is preempted comes later in the order than who preempts him, so nothing planned is taken back.
        """
        scheduled = SchedulerOutput()
        self._free_finishing()
        self._admission.running_changed()
        budget = self.max_batch_tokens
        preempted: set[Request] = set()
        running = sorted([(schedule_key(request), request) for request in self.running])
        prompts = PrefillBudget(self.prefill_limit, running)
        order = heapq.merge(running, self._waiting_in_order(preempted)) if self.waiting else running
        for (_, pending, _), request in order:
            if budget == 0:
                break
            allowed = prompts.allow(request, budget) if pending else budget
            if request in preempted or allowed == 0:
                continue
            if request.is_running:
                preempted.update(self._extend_blocks(request))
            elif request is self.waiting[0]:  # else someone older was sent back to wait just now
                preempted.update(self._admit(request))
                if request.is_running:
                    scheduled.admitted.append(request)
            if request.is_running:
                chunk = self._schedule_chunk(request, allowed)
                scheduled.chunks.append(chunk)
                budget -= chunk.stop - chunk.start
                if pending:
                    prompts.take(request, chunk.stop - chunk.start)
                else:
                    prompts.is_limited = True
        if self.waiting:
            full, is_late = len(self.running) >= self.max_seqs, prompts.is_exhausted
            self.held_back["slots" if full else "target" if is_late else "cache" if budget else "budget"] += 1
        return scheduled

    def _free_finishing(self) -> None:
        """Takes seats and blocks from requests whose last token is coming: others can have them from this step on."""
        for request in [request for request in self.running if request.is_finishing]:
            self._stop_running(request)

    def _schedule_chunk(self, request: Request, budget: int) -> ScheduledChunk:
        """The request's next tokens, as many as the budget allows; they count as computed."""
        chunk = ScheduledChunk.of(request, budget)
        request.num_computed = chunk.stop
        request.num_output_placeholders += chunk.is_last
        self._cache_full_blocks(request, chunk.start)
        return chunk

    def _cache_full_blocks(self, request: Request, start: int) -> None:
        """Makes known the blocks that are full from token `start` on, as far as it is known what they hold."""
        stop, size = min(request.num_computed, len(request.token_ids)), self.pool.block_size
        if self.prefix_cache and start // size < stop // size:
            self.pool.cache_full_blocks(request.blocks, request.token_ids, start, stop)

    def shrink(self, num_tokens: int) -> bool:
        """Makes steps half as large as one of `num_tokens`, which memory could not hold; False where that was 1."""
        num_tokens = min(num_tokens, self.max_batch_tokens)
        if num_tokens <= 1:
            return False
        self.max_batch_tokens = num_tokens // 2
        self.max_seqs = min(self.max_seqs, self.max_batch_tokens)
        for request in sorted(self.running, key=priority_key)[self.max_seqs :]:
            self._preempt(request)
        return True

    def grow(self) -> bool:
        """Makes steps twice as large as `shrink` has left them, up to what they were; True when they are that again."""
        tokens, seqs = self._limits
        self.max_batch_tokens = min(2 * self.max_batch_tokens, tokens)
        self.max_seqs = min(2 * self.max_seqs, seqs, self.max_batch_tokens)
        return (self.max_batch_tokens, self.max_seqs) == self._limits

    def _waiting_in_order(self, preempted: set[Request]) -> Iterator[tuple[ScheduleKey, Request]]:
        """The first waiting request, again and again, until one stays waiting or was preempted just now."""
        while self.waiting and self.waiting[0] not in preempted:
            head = self.waiting[0]
            yield schedule_key(head), head
            if not head.is_running:
                return

    def update_from_output(self, scheduled: SchedulerOutput, result: StepResult) -> list[TokenEvent]:
        """Takes in what a step has computed, but for requests that have ended since it was planned."""
        for chunk, scores in zip(scheduled.to_score, result.scores, strict=True):
            known = chunk.request.scored
            known += scores[len(known) - chunk.to_score.start :]
        events = []
        for chunk, sample in zip(scheduled.to_sample, result.samples, strict=True):
            if sample.error is not None and sample.error.code == "nan_logits":
                self.pool.evict(chunk.blocks)  # others must not take over what may be no numbers either
            if not chunk.request.has_ended:
                events.append(self._accept(chunk.request, sample))
        return events

    def _accept(self, request: Request, sample: Sample) -> TokenEvent:
        """Gives a request the token that was coming."""
        request.num_output_placeholders -= 1
        if request.num_generated == 0:
            self.num_prompt_tokens += request.num_prompt
            self.num_cached_tokens += request.num_cached
        event = request.accept(sample)
        if event.finish_reason is not None:
            if event.token_id is not None:
                self._admission.observe_length(request.num_generated)
            self.cancel(request)
        else:
            self._cache_full_blocks(request, len(request.token_ids) - 1)
        return event

    def rollback(self, scheduled: SchedulerOutput) -> None:
        """Takes back a plan that was not computed: what it published, and who entered relying on that.

        Steps that were planned later have to be taken back too.
        """
        size = self.pool.block_size
        for chunk in scheduled.chunks:
            request = chunk.request
            self.pool.evict(chunk.blocks[chunk.start // size : chunk.stop // size])
            request.num_output_placeholders -= chunk.is_last
            if request.blocks is chunk.blocks:
                request.num_computed = min(request.num_computed, chunk.start)
            elif request in self.finishing:
                self.finishing.remove(request)
                self.add(request)
        for request in scheduled.admitted:
            if request.is_running:
                self._stop_running(request)

    def check_integrity(self) -> None:
        """Raises AssertionError where an invariant is broken; tests call it after every step."""
        self.pool.check_integrity()
        held = Counter(block for request in self.running for block in request.blocks)
        assert all(self.pool.ref_count(block) == count for block, count in held.items())
        assert len(held) == self.pool.num_used, "a block is taken that nobody holds"
        assert all(len(request.blocks) == len(set(request.blocks)) for request in self.running)
        assert not any(request.blocks or request.num_computed for request in self.waiting)
        assert not set(self.running) & set(self.waiting) and len(self.running) <= self.max_seqs
        assert not any(request.blocks or request in self.waiting for request in self.finishing)
        for request in self.running:
            assert request.num_computed <= len(request.blocks) * self.pool.block_size

    def _admit(self, request: Request) -> list[Request]:
        """Seats a waiting request with blocks for all its known tokens, or leaves it waiting.

        Returns the requests of lower priority that had to go for it.
        """
        if len(self.running) >= self.max_seqs and all(other.priority <= request.priority for other in self.running):
            return []
        # A prompt that is scored needs the logits of all its tokens.
        shared = (
            self.pool.get_cached_blocks(request.token_ids)
            if self.prefix_cache and not request.has_unscored_prompt
            else []
        )
        victims = self._admission.find_victims(request, shared, self.running, self.max_seqs)
        if victims is None:
            return []
        for victim in victims:
            self._preempt(victim)
        self.waiting.remove(request)
        self.running.append(request)
        self.pool.touch(shared)
        request.blocks = shared + self.pool.allocate(self.pool.blocks_for(request.num_tokens) - len(shared))
        request.num_computed = len(shared) * self.pool.block_size
        if request.num_generated == 0 and request.num_preemptions == 0:
            request.num_cached = request.num_computed
        self._admission.admit(request)
        return victims

    def _extend_blocks(self, request: Request) -> Sequence[Request]:
        """Gives a running request blocks for all its known tokens. Returns whom that preempted, perhaps itself."""
        need = self.pool.blocks_for(request.num_tokens) - len(request.blocks)
        if need <= 0:
            return ()
        victims: list[Request] = []
        while self.pool.num_free < need and request not in victims:
            victims.append(max(self.running, key=priority_key))
            victims[-1].num_peer_preemptions += victims[-1].priority == request.priority
            self._preempt(victims[-1])
        if request not in victims:
            request.blocks += self.pool.allocate(need)
        return victims

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        self._admission.running_changed()
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _stop_running(self, request: Request) -> None:
        """Takes seat and blocks from a request; it waits for others, or only for its last token."""
        self._free_blocks(request)
        request.num_computed = 0
        if request.is_finishing:
            self.finishing.add(request)
        else:
            self.add(request)

    def _free_blocks(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free(request.blocks)
        request.blocks = []
