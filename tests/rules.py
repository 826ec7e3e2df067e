"""What must be true of the scheduler's plans and of its bookkeeping, said without looking at how it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from cbatch.engine.plan import StepPlan
from cbatch.engine.request import Request
from cbatch.engine.scheduler import Scheduler


class Violation(AssertionError):
    """Something that must be true is not."""


def demand(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Violation(otherwise)


@dataclass(frozen=True, slots=True)
class Moment:
    """What was so before a step: who is to advance in any case, who was running, and who of those was decoding."""

    first: Request | None
    running: frozenset[Request]
    decoding: tuple[Request, ...]

    @classmethod
    def of(cls, scheduler: Scheduler) -> Moment:
        first = min(scheduler.running + scheduler.waiting, key=lambda r: (r.priority, r.id), default=None)
        decoding = tuple(request for request in scheduler.running if request.is_decoding)
        return cls(first, frozenset(scheduler.running), decoding)


def check_plan(scheduler: Scheduler, plan: StepPlan, before: Moment) -> None:
    """Limits, slices, progress and the order of service of one step, before it is computed."""
    requests = [slice_.request for slice_ in plan.slices]
    planned, admitted = set(requests), set(plan.admitted)
    demand(len(requests) == len(planned) <= scheduler.max_seqs, "more slices than seats, or two for one request")
    demand(plan.num_tokens <= scheduler.max_batch_tokens, "more tokens than a step may have")
    demand(planned <= set(scheduler.running), "a slice of a request that has no seat")
    demand(admitted == planned - before.running, "who entered is not who was planned without having run")
    for slice_ in plan.slices:
        request, end = slice_.request, slice_.stop
        demand(request.num_computed == slice_.start < end <= request.num_tokens, "a slice that does not fit")
        demand(slice_.is_last == (end == request.num_tokens), "a wrong is_last")
        demand(end <= len(request.blocks) * scheduler.pool.block_size, "a token that has no place in the cache")
    demand(before.first is None or before.first in planned, "the oldest of the highest priority does not advance")
    if plan.num_tokens < scheduler.max_batch_tokens:
        whole = {slice_.request for slice_ in plan.slices if slice_.is_last}
        demand(whole == set(scheduler.running), "budget is left, and somebody did not get all he wants")
    for request in before.decoding:
        if request.is_running and request not in planned:
            _check_passed_over(scheduler, plan, request)


def _check_passed_over(scheduler: Scheduler, plan: StepPlan, request: Request) -> None:
    """A decoding request gets no token only where higher priorities, and older ones of its own, took all of them."""
    higher = sum(slice_.count for slice_ in plan.slices if slice_.request.priority < request.priority)
    beside = [s for s in plan.slices if s.request.priority == request.priority and s.request.id < request.id]
    taken = higher + sum(slice_.count for slice_ in beside if slice_.count == 1)
    demand(higher > 0 and taken == scheduler.max_batch_tokens, f"request {request.id} is decoding and was passed over")


def check_between_steps(scheduler: Scheduler, live: Collection[Request]) -> None:
    """Every live request is in one place, every block is free or held, and what will be written has one owner."""
    scheduler.check_integrity()
    pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    demand(len(running) + len(waiting) == len(live), "a request is in two places, or in none")
    demand({*running, *waiting} == set(live), "a request is lost, or is there and should not be")
    demand(len(running) <= scheduler.max_seqs, "more requests run than there are seats")
    held = Counter(block for request in running for block in request.blocks)
    references = {block: count for block in range(pool.num_blocks) if (count := pool.references(block))}
    demand(references == held, "references differ from who holds the blocks")
    demand(pool.num_free + len(held) == pool.num_blocks, "free and held blocks are not all blocks")
    for request in running:
        demand(0 < request.num_computed < request.num_tokens, "nothing computed, or nothing left to compute")
        for block in request.blocks[request.num_computed // pool.block_size :]:
            demand(held[block] == 1, f"block {block} will be written and has two owners")
