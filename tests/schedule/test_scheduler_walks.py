"""Block pool, prefix cache and scheduler in random walks, each step checked against an oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.prefill_budget import PrefillBudget
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import Snapshot, StateSlots
from tests.support.scheduler_simulation import RandomWalk


def count_events(walks: int, **options: bool) -> Counter[str]:
    """Counts what happens in so many random walks."""
    counts: Counter[str] = Counter()
    for number in range(walks):
        walk = RandomWalk(0, number, **options).run(150)
        counts += walk.counts + Counter(preemptions=walk.scheduler.num_preemptions)
    return counts


COMMON = "failed steps,NaN requests,cancelled running,shared blocks,preemptions"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "copied blocks,shrinks,limits,cancelled waiting,finished by stop,finished by length"),
        ({"recurrent": True}, "failed late,snapshots"),
        ({"spans": True}, "spans beyond the budget,shrinks,limits"),
    ],
)
def test_random_walks_meet_everything(options: dict[str, bool], names: str) -> None:
    """Guards outputs against other requests, blocks and slots against two owners, and requests against starving.

    And the walks: they meet all that the scheduler has to survive.
    """
    counts = count_events(15, **options)
    assert all(counts[name] >= 10 for name in f"{COMMON},{names}".split(",")), counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"recurrent": True}, {"spans": True}])
def test_long_walks(options: dict[str, bool]) -> None:
    """Guards the same, with other seeds and for longer."""
    for number in range(60):
        RandomWalk(1, number, **options).run(300)


def free_too_early(self: BlockPool, blocks: Sequence[int]) -> None:
    """Frees a block that another request still holds, so that it is allocated again and overwritten."""
    for block in reversed(blocks):
        self._references[block] -= 1
        if self._references[block] <= 1:
            self._free[block] = None


def cache_too_early(
    self: BlockPool, blocks: Sequence[int], token_ids: Sequence[int], start: int, stop: int, kind: int = 0
) -> None:
    """Caches blocks that only later steps will fill."""
    cache_full_blocks(self, blocks, token_ids, start, min(len(token_ids), len(blocks) * self.block_size))


def roll_back_but_leave_cached(self: Scheduler, scheduled: SchedulerOutput) -> None:
    """Leaves the blocks of a rolled back step cached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self.pool, "evict", lambda blocks: None)
        rollback(self, scheduled)


def keep_running_after_the_end(self: Scheduler, scheduled: SchedulerOutput, results: Iterable[Any]) -> Any:
    """Forgets that the last token of a decoding request is in the cache now."""
    events = update_from_output(self, scheduled, results)
    for chunk in scheduled.chunks:
        if chunk.sequence.blocks is chunk.blocks:
            chunk.sequence.num_computed = max(chunk.start, 1)
    return events


def keep_what_begins_a_block(self: BlockPool, blocks: Sequence[int]) -> None:
    """Goes on to offer copies of a block that has another owner now."""
    begun = self._begun.copy(), self._begun_keys.copy()
    evict(self, blocks)
    self._begun, self._begun_keys = begun


def copy_at_once(self: Scheduler, chunk: ScheduledChunk) -> Sequence[int]:
    """Lets a choice copy a block in the step that fills it."""
    cache_begun_block(self, chunk)
    return ()


evict, cache_begun_block = BlockPool.evict, Scheduler._cache_begun_block
cache_full_blocks, rollback, update_from_output = (
    BlockPool.cache_full_blocks,
    Scheduler.rollback,
    Scheduler.update_from_output,
)
FAULTS: list[tuple[type, str, Any]] = [
    (BlockPool, "free", free_too_early),
    (BlockPool, "cache_full_blocks", cache_too_early),
    (BlockPool, "evict", keep_what_begins_a_block),
    (Scheduler, "_cache_begun_block", copy_at_once),
    (Scheduler, "rollback", roll_back_but_leave_cached),
    (Scheduler, "update_from_output", keep_running_after_the_end),
]


def leave_what_was_there(self: StateSlots, snapshot: Snapshot | None) -> tuple[int, int | None]:
    """Neither zeroes a slot nor copies a snapshot to it."""
    return take_with(self, snapshot)[0], None


def find_at_once(self: StateSlots, contents: Sequence[int]) -> Snapshot | None:
    """Takes over snapshots in the step that makes them."""
    return next((self._known[content] for content in reversed(contents) if content in self._known), None)


def snapshot_one_token_late(self: StateSlots, tokens: int, spare: bool = False) -> Snapshot | None:
    """Says that a snapshot is of one token fewer than it has taken in."""
    snapshot = make(self, tokens, spare)
    if snapshot is not None:
        snapshot.tokens += 1
    return snapshot


def keep_states_after_rollback(self: Scheduler, scheduled: SchedulerOutput) -> None:
    """Lets requests of a step that was rolled back go on from the states that it has left."""
    stop = self._stop_running
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            self, "_stop_running", lambda sequence: stop(sequence) if sequence in scheduled.admitted else None
        )
        rollback(self, scheduled)
    for chunk in scheduled.chunks:
        if chunk.sequence.is_running:
            chunk.sequence.num_computed = min(chunk.sequence.num_computed, chunk.start)


take_with, make = StateSlots.take_with, StateSlots.make
STATE_FAULTS: list[tuple[type, str, Any]] = [
    (StateSlots, "take_with", leave_what_was_there),
    (StateSlots, "find", find_at_once),
    (StateSlots, "make", snapshot_one_token_late),
    (Scheduler, "rollback", keep_states_after_rollback),
]


def cut_spans(self: PrefillBudget, sequence: TokenSequence, budget: int) -> int:
    """Lets chunks end within parts that a step is to compute whole."""
    return budget


def keep_to_the_budget(self: PrefillBudget, sequence: TokenSequence, budget: int) -> int:
    """Lets a part that is larger than a step wait forever."""
    return min(allow_spans(self, sequence, budget), budget)


allow_spans = PrefillBudget.allow_spans
SPAN_FAULTS: list[tuple[type, str, Any]] = [
    (PrefillBudget, "allow_spans", cut_spans),
    (PrefillBudget, "allow_spans", keep_to_the_budget),
]


@pytest.mark.parametrize(
    "fault", [*FAULTS, *STATE_FAULTS, *SPAN_FAULTS], ids=lambda one: getattr(one[2], "fget", one[2]).__name__
)
def test_planted_faults_are_seen(fault: tuple[type, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the simulation itself: it finds these faults."""
    owner, method, wrong = fault
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises((AssertionError, ValueError)):
        count_events(100, recurrent=fault in STATE_FAULTS, spans=fault in SPAN_FAULTS)
