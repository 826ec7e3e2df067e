"""Block pool, prefix cache and scheduler under whatever hypothesis generates, checked against an oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.prefill_budget import PrefillBudget
from cbatch.schedule.recurrent_states import RecurrentStates
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import Snapshot, StateSlots
from tests.support.random_walk import RandomWalk
from tests.support.scheduler_invariants import Violation
from tests.support.scheduler_simulation import SchedulerSimulation, SimulationSizes

MOST_LIVE = 12

shapes = st.builds(
    SimulationSizes,
    block_size=st.integers(1, 8),
    num_blocks=st.sampled_from([9, 5, 12, 16, 24, 14, 7, 2]),
    max_seqs=st.sampled_from([3, 5, 8, 2, 6, 4, 8, 1]),
    max_batch_tokens=st.sampled_from([9, 16, 32, 24, 6, 12, 4, 1]),
    max_model_len=st.sampled_from([1000, 1000, 20]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    vocabulary=st.sampled_from([2, 50]),
    colliding=st.booleans(),
    overlap=st.sampled_from([True, True, False]),
    state_slots=st.sampled_from([None, None, 6, 12, 3, 1]),
    chunk_multiple=st.sampled_from([1, 4, 3]),
)
which = st.integers(0, 2 * MOST_LIVE)
tails = st.lists(st.integers(0, 1), max_size=9)
lengths = st.integers(1, 12)
priorities = st.integers(1, 3)
stops = st.none() | lengths


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler; the simulation checks its invariants after each action."""

    simulation: SchedulerSimulation

    @initialize(sizes=shapes)
    def begin(self, sizes: SimulationSizes) -> None:
        self.simulation = SchedulerSimulation(sizes)

    @rule(several=st.lists(tails, min_size=1, max_size=5), tokens=lengths, priority=priorities, stop=stops)
    def add(self, several: list[list[int]], tokens: int, priority: int, stop: int | None) -> None:
        for tail in several:
            self._add(self.simulation.prompt(0, 0, tail), tokens, priority, stop)

    @rule(row=which, cut=st.integers(1, 16), tail=tails, tokens=lengths, priority=priorities, stop=stops)
    def share(self, row: int, cut: int, tail: list[int], tokens: int, priority: int, stop: int | None) -> None:
        self._add(self.simulation.prompt(row, cut, tail), tokens, priority, stop)

    @rule(row=which, tail=st.just([]) | tails, tokens=lengths, priority=priorities)
    def fork(self, row: int, tail: list[int], tokens: int, priority: int) -> None:
        self._add(self.simulation.prompt(row, 0, tail, generated=True), tokens, priority)

    @rule(row=which, cut=st.integers(0, 16), tail=tails, tokens=lengths)
    def add_urgent(self, row: int, cut: int, tail: list[int], tokens: int) -> None:
        self._add(self.simulation.prompt(row, cut, tail), tokens, 0)

    @rule(first=st.integers(0, 9), parts=st.integers(1, 5), priority=priorities)
    def fill_the_cache(self, first: int, parts: int, priority: int) -> None:
        length = self.simulation.scheduler.pool.capacity // parts
        for start in range(first, first + parts):
            self._add(self.simulation.prompt(0, 0, [start + place % 10 for place in range(length)]), 1, priority)

    @rule()
    def step_once(self) -> None:
        self.simulation.step()

    @rule(count=st.integers(2, 9))
    def step_on(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @rule(broken=st.sets(st.integers(0, 7), min_size=1, max_size=2))
    def step_with_nan(self, broken: set[int]) -> None:
        self.simulation.step(broken=broken)

    @rule(garbage=st.booleans(), late=st.booleans(), shrink=st.sampled_from([False] * 7 + [True]))
    def fail_step(self, garbage: bool, late: bool, shrink: bool) -> None:
        self.simulation.fail_step(garbage=garbage, late=late, shrink=shrink)

    @rule(row=which)
    def cancel(self, row: int) -> None:
        self.simulation.cancel(row)

    @rule(part=st.sampled_from([1.0, 0.7, 0.3]), grow=st.booleans())
    def shrink(self, part: float, grow: bool) -> None:
        self.simulation.shrink(max(1, int(part * self.simulation.scheduler.max_batch_tokens)))
        if grow:
            self.grow()

    @rule(limit=st.sampled_from([None, 1, 2, 5]))
    def limit_prefill(self, limit: int | None) -> None:
        self.simulation.limit_prefill(limit)

    @rule()
    def grow(self) -> None:
        while not self.simulation.grow():
            self.simulation.step()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.grow()
            self.simulation.drain()

    def _add(self, prompt: list[int], tokens: int, priority: int, stop: int | None = None) -> None:
        if len(self.simulation.sequences) < MOST_LIVE:
            self.simulation.add(prompt, tokens, priority, stop)


@pytest.mark.slow
def test_invariants_hold_under_all_actions() -> None:
    """Guards every output against other requests, every block against two owners, every request against starving."""
    quick = settings(
        max_examples=100,
        stateful_step_count=60,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(SchedulerMachine, settings=quick)


def test_the_smallest_step_does_not_shrink() -> None:
    """Guards against steps without tokens, in which no request could advance."""
    scheduler = Scheduler(BlockPool(4, 1), StepLimits(1, 1), max_model_len=8)
    assert not scheduler.shrink(2) and scheduler.max_batch_tokens == scheduler.max_seqs == 1


def count_events(walks: int, *, recurrent: bool = False) -> Counter[str]:
    """Counts what happens in so many random walks."""
    counts: Counter[str] = Counter()
    for number in range(walks):
        simulation = RandomWalk(0, number, recurrent=recurrent).run(150)
        counts += simulation.counts + Counter(preemptions=simulation.scheduler.num_preemptions)
    return counts


def test_random_walks_meet_everything() -> None:
    """Guards the soak test: its random walks meet everything that the scheduler has to survive."""
    counts = count_events(25)
    names = "failed steps,shrinks,limits,NaN requests,cancelled running,cancelled waiting,shared blocks,preemptions"
    assert all(counts[name] >= 10 for name in [*names.split(","), "finished by stop", "finished by length"]), counts


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


def compare_hashes_only(self: BlockPool, token_ids: Sequence[int], kind: int = 0) -> list[int]:
    """Compares hashes instead of tokens."""
    blocks = []
    content, size = 0, self.block_size
    known = {hash(key): block for key, block in self._known.items()}
    for start in range(0, len(token_ids) - size, size):
        block = known.get(hash((content, tuple(token_ids[start : start + size]))))
        if block is None:
            break
        blocks.append(block)
        content = self._contents[block]
    return blocks


def overlook_the_kind(self: BlockPool, token_ids: Sequence[int], kind: int = 0) -> list[int]:
    """Shares blocks between requests whose tokens have other position ids."""
    return get_cached_blocks(self, token_ids) or get_cached_blocks(self, token_ids, kind)


def roll_back_but_leave_cached(self: Scheduler, scheduled: SchedulerOutput) -> None:
    """Leaves the blocks of a rolled back step cached."""
    evict = self.pool.evict
    self.pool.evict = lambda blocks: None  # type: ignore[method-assign]
    rollback(self, scheduled)
    self.pool.evict = evict  # type: ignore[method-assign]


def keep_running_after_the_end(self: Scheduler, scheduled: SchedulerOutput, results: Iterable[Any]) -> Any:
    """Forgets that the last token of a decoding request is in the cache now."""
    events = update_from_output(self, scheduled, results)
    for chunk in scheduled.chunks:
        if chunk.sequence.blocks is chunk.blocks:
            chunk.sequence.num_computed = max(chunk.start, 1)
    return events


def update_ended_requests(self: Scheduler, scheduled: SchedulerOutput, results: Iterable[Any]) -> Any:
    """Gives requests that have ended the token of a step in flight."""
    for chunk in scheduled.chunks:
        chunk.sequence.has_ended = False
    return update_from_output(self, scheduled, results)


def overlook_lost_blocks(self: Scheduler, scheduled: SchedulerOutput, results: Iterable[Any]) -> Any:
    """Evicts only the blocks that a request with a NaN holds now, not those it has lost."""
    chunks = [chunk._replace(blocks=chunk.sequence.blocks) for chunk in scheduled.chunks]
    return update_from_output(self, SchedulerOutput(chunks, scheduled.admitted), results)


def keep_placeholders_after_rollback(self: Scheduler, scheduled: SchedulerOutput) -> None:
    """Keeps the placeholders of a step that was rolled back."""
    rollback(self, scheduled)
    for chunk in scheduled.chunks:
        chunk.sequence.num_output_placeholders += chunk.is_last


def never_finishing(sequence: TokenSequence) -> bool:
    """Schedules requests whose last token is in flight."""
    return False


def keep_nan_blocks_cached(self: Scheduler, scheduled: SchedulerOutput, results: Iterable[Any]) -> Any:
    """Leaves the blocks of a request with a NaN cached."""
    evict = self.pool.evict
    self.pool.evict = lambda blocks: None  # type: ignore[method-assign]
    events = update_from_output(self, scheduled, results)
    self.pool.evict = evict  # type: ignore[method-assign]
    return events


def take_without_counting(self: PrefillBudget, sequence: TokenSequence, count: int) -> None:
    """Does not count tokens against the limit."""


def allow_everything(self: PrefillBudget, sequence: TokenSequence, budget: int) -> int:
    """Leaves nothing to the oldest prompt."""
    return budget if self._left is None or not self.is_limited else min(self._left, budget)


cache_full_blocks, get_cached_blocks, rollback, update_from_output = (
    BlockPool.cache_full_blocks,
    BlockPool.get_cached_blocks,
    Scheduler.rollback,
    Scheduler.update_from_output,
)
FAULTS: list[tuple[type, str, Any, str]] = [
    (BlockPool, "free", free_too_early, "free and held blocks"),
    (BlockPool, "cache_full_blocks", cache_too_early, "hold something else|not its own"),
    (BlockPool, "get_cached_blocks", compare_hashes_only, "hold something else|not its own"),
    (BlockPool, "get_cached_blocks", overlook_the_kind, "hold something else|not its own"),
    (Scheduler, "rollback", roll_back_but_leave_cached, "hold something else|not its own"),
    (Scheduler, "update_from_output", keep_running_after_the_end, "two owners|bound of steps|does not fit"),
    (Scheduler, "update_from_output", update_ended_requests, "not an event a token|two places|not in list"),
    (Scheduler, "update_from_output", overlook_lost_blocks, "NaN"),
    (Scheduler, "rollback", keep_placeholders_after_rollback, "count on other tokens"),
    (TokenSequence, "is_finishing", property(never_finishing), "too many is coming"),
    (Scheduler, "update_from_output", keep_nan_blocks_cached, "NaN"),
    (PrefillBudget, "take", take_without_counting, "tokens of prompts"),
    (PrefillBudget, "allow", allow_everything, "does not advance|younger ones"),
]


def test_random_walks_with_states_meet_everything() -> None:
    """Guards the soak test of recurrent layers: snapshots are made, taken over, and dropped with NaN in them."""
    counts = count_events(25, recurrent=True)
    names = "failed steps,failed late,snapshots,shared blocks,NaN requests,preemptions,cancelled running"
    assert all(counts[name] >= 10 for name in names.split(",")), counts


def leave_what_was_there(self: StateSlots, snapshot: Snapshot | None) -> tuple[int, int | None]:
    """Neither zeroes a slot nor copies a snapshot to it."""
    return take_with(self, snapshot)[0], None


def find_at_once(self: StateSlots, contents: Sequence[int]) -> Snapshot | None:
    """Takes over snapshots in the step that makes them."""
    return next((self._known[content] for content in reversed(contents) if content in self._known), None)


def evict_what_is_in_use(self: StateSlots, snapshot: Snapshot) -> bool:
    """Gives away slots that the step copies from or to."""
    return True


def snapshot_one_token_late(self: StateSlots, tokens: int, spare: bool = False) -> Snapshot | None:
    """Says that a snapshot is of one token fewer than it has taken in."""
    snapshot = make(self, tokens, spare)
    if snapshot is not None:
        snapshot.tokens += 1
    return snapshot


def keep_states_after_rollback(self: Scheduler, scheduled: SchedulerOutput) -> None:
    """Lets requests of a step that was rolled back go on from the states that it has left."""
    stop = self._stop_running
    self._stop_running = lambda sequence: stop(sequence) if sequence in scheduled.admitted else None  # type: ignore[method-assign]
    rollback(self, scheduled)
    self._stop_running = stop  # type: ignore[method-assign]
    for chunk in scheduled.chunks:
        if chunk.sequence.is_running:
            chunk.sequence.num_computed = min(chunk.sequence.num_computed, chunk.start)


def keep_nan_snapshots(self: RecurrentStates, chunk: ScheduledChunk) -> None:
    """Leaves snapshots of a request with a NaN to be found."""


def cut_anywhere(self: RecurrentStates, sequence: TokenSequence, budget: int, *, spare: bool) -> ScheduledChunk:
    """Cuts prompts where the budget ends."""
    self.multiple = 1
    return schedule_chunk(self, sequence, budget, spare=spare)


take_with, make, schedule_chunk = StateSlots.take_with, StateSlots.make, RecurrentStates.schedule_chunk
STATE_FAULTS: list[tuple[type, str, Any, str]] = [
    (StateSlots, "take_with", leave_what_was_there, "not its own"),
    (StateSlots, "find", find_at_once, "copied and overwritten|not its own"),
    (StateSlots, "_can_go", evict_what_is_in_use, "two owners|copied and overwritten|not its own|something else"),
    (StateSlots, "make", snapshot_one_token_late, "not its own|something else|outside of its chunk"),
    (Scheduler, "rollback", keep_states_after_rollback, "not its own"),
    (RecurrentStates, "evict", keep_nan_snapshots, "NaN"),
    (RecurrentStates, "schedule_chunk", cut_anywhere, "a prompt that is cut at"),
]


@pytest.mark.parametrize(
    ("owner", "method", "fault", "message"),
    STATE_FAULTS,
    ids=[fault.__name__ for _, _, fault, _ in STATE_FAULTS],
)
def test_planted_faults_of_states_are_seen(
    owner: type, method: str, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the simulation: a slot that is not zeroed, a snapshot that is one token off or stale, a shifted grid."""
    monkeypatch.setattr(owner, method, fault)
    monkeypatch.setattr(Scheduler, "check_integrity", lambda self: None)
    with pytest.raises((Violation, ValueError), match=message):
        count_events(100, recurrent=True)


@pytest.mark.parametrize(
    ("owner", "method", "fault", "message"),
    FAULTS,
    ids=[getattr(fault, "fget", fault).__name__ for _, _, fault, _ in FAULTS],
)
def test_planted_faults_are_seen(
    owner: type, method: str, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the test itself: it finds these faults even without the scheduler's own integrity check."""
    monkeypatch.setattr(owner, method, fault)
    monkeypatch.setattr(Scheduler, "check_integrity", lambda self: None)
    with pytest.raises((Violation, ValueError), match=message):
        count_events(100)
