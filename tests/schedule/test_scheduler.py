"""The scheduler and the block pool without a model: nothing leaks, no request starves, budgets hold."""

from __future__ import annotations

import random

import pytest

from cbatch.base.errors import RequestError
from cbatch.base.outputs import Sample
from cbatch.base.request import Request
from cbatch.schedule.admission import (
    MAX_PREEMPTIONS,
    PRIOR,
    AdmissionPolicy,
    Growth,
    OutputLengths,
    projected_peak,
)
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import StepResult
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence


def make_scheduler(blocks: int = 8, block_size: int = 4, seqs: int = 4, budget: int = 16) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size), StepLimits(seqs, budget), max_model_len=1000, prefix_cache=False)


def make_request(number: int, prompt: int, output: int = 1, priority: int = 0) -> TokenSequence:
    return TokenSequence(number, [1] * prompt, Request(max_new_tokens=output, priority=priority))


def add(scheduler: Scheduler, *sequences: TokenSequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def step(scheduler: Scheduler) -> dict[int, int]:
    scheduled = scheduler.schedule()
    scheduler.check_integrity()
    planned = {chunk.sequence.id: chunk.num_tokens for chunk in scheduled.chunks}
    assert sum(planned.values()) <= scheduler.max_batch_tokens
    scheduler.update_from_output(scheduled, StepResult([Sample(7)] * len(scheduled.to_sample)))
    scheduler.check_integrity()
    return planned


def test_pool_finds_cached_content_and_evicts_the_oldest() -> None:
    """Guards the prefix cache: tokens and what is before them decide; the least recently used block goes first."""
    pool = BlockPool(5, 2)
    blocks = pool.allocate(3)
    pool.cache_full_blocks(blocks, [1, 2, 3, 4, 5, 6], 0, 6)
    assert pool.get_cached_blocks([1, 2, 3, 4, 5, 6]) == blocks[:2], "the last token is left to compute"
    assert pool.get_cached_blocks([1, 2, 3, 4, 5, 6, 7]) == blocks
    assert pool.get_cached_blocks([3, 4, 5]) == [] and pool.get_cached_blocks([1, 2, 9, 4, 5]) == blocks[:1]
    pool.touch(blocks[:2])
    pool.free(blocks)
    pool.check_integrity()
    assert pool.num_used == 2 and pool.get_cached_blocks([1, 2, 3, 4, 5, 6, 7]) == blocks
    pool.allocate(3)
    assert pool.get_cached_blocks([1, 2, 3, 4, 5, 6, 7]) == blocks[:2], "a block that is handed out anew holds nothing"
    pool.free(blocks[:2])
    pool.allocate(1)
    assert pool.get_cached_blocks([1, 2, 3, 4, 5]) == blocks[:1], "the end of a sequence goes before its beginning"
    pool.check_integrity()


class CollidingToken(int):
    """A token with the same hash as any other, so that only its value tells it apart."""

    def __hash__(self) -> int:
        return 0


def test_tokens_of_equal_hashes_are_told_apart() -> None:
    """Guards one prompt against the blocks of another that only has the same hash."""
    pool, (one, two, three) = BlockPool(4, 2), map(CollidingToken, (1, 2, 3))
    blocks = pool.allocate(2)
    pool.cache_full_blocks(blocks, [one, two, two, three], 0, 4)
    assert pool.get_cached_blocks([one, two, two, three, one]) == blocks
    assert pool.get_cached_blocks([one, two, one, three, one]) == blocks[:1]
    assert pool.get_cached_blocks([one, three, two, three, one]) == []


def test_content_computed_twice_is_found_with_what_follows() -> None:
    """Guards two requests that fill the same block in the same step: what either of them adds is found."""
    pool = BlockPool(6, 2)
    one, other = pool.allocate(2), pool.allocate(3)
    pool.cache_full_blocks(one, [1, 2, 3, 4], 0, 4)
    pool.cache_full_blocks(other, [1, 2, 3, 4, 5, 6], 0, 6)
    assert pool.get_cached_blocks([1, 2, 3, 4, 5, 6, 7]) == [*one, other[2]]
    pool.free(other)
    pool.check_integrity()
    assert set(pool.allocate(3)) >= set(other[:2]), "the copies, which nobody can find, are handed out first"
    assert pool.get_cached_blocks([1, 2, 3, 4, 5, 6, 7]) == [*one, other[2]]


def test_a_higher_priority_counts_shared_blocks_once() -> None:
    """Guards the blocks for an urgent request if its victims share blocks with each other or with it."""
    for blocks in range(7, 16):
        scheduler = Scheduler(BlockPool(blocks, 4), StepLimits(8, 64), 1000)
        add(scheduler, *(make_request(n, 13, 8, priority=5) for n in range(4)))
        step(scheduler)
        urgent = make_request(9, 21, 1, priority=1)
        add(scheduler, urgent)
        assert 9 in step(scheduler), f"{blocks} blocks"
        while scheduler.has_work:
            step(scheduler)


@pytest.mark.parametrize("beside", [0, 1])
def test_prompts_that_begin_alike_are_computed_once_in_parts(beside: int) -> None:
    """Guards against computing what prompts share again, if each comes to it before another has computed it."""
    scheduler = Scheduler(BlockPool(200, 4), StepLimits(8, 16), 1000)
    add(scheduler, *(make_request(number, 3, output=100) for number in range(beside)))
    step(scheduler)
    prompts = [TokenSequence(8 + n, [2] * 150 + [3 + n] * 7, Request(max_new_tokens=1)) for n in range(4)]
    add(scheduler, *prompts)
    computed = 0
    while any(not prompt.has_ended for prompt in prompts):
        computed += sum(count for number, count in step(scheduler).items() if number >= 8)
    own = 4 * (7 + 150 % 4)
    assert computed <= 148 + own + 4 * 4 and sum(prompt.num_cached for prompt in prompts) == 4 * 157 - computed


def test_prefill_is_chunked_and_shares_the_budget_with_decode() -> None:
    """Guards the core idea: a decoding request gets a token in every step while a long prompt is computed."""
    scheduler = make_scheduler(blocks=20, budget=8)
    add(scheduler, make_request(0, 3, output=10))
    assert step(scheduler) == {0: 3}
    add(scheduler, make_request(1, 20, output=1))
    assert [step(scheduler) for _ in range(3)] == [{0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}]
    assert step(scheduler) == {0: 1}


def test_running_out_of_blocks_preempts_the_youngest() -> None:
    """Guards the order of preemption, and that the preempted request keeps its tokens."""
    scheduler = make_scheduler(blocks=6, budget=64)
    old, young = make_request(0, 7, output=16), make_request(1, 7, output=16)
    add(scheduler, old, young)
    while not young.num_preemptions:
        planned = step(scheduler)
    assert planned == {0: 1} and young.num_tokens == 13 and not young.blocks
    while scheduler.has_work:
        step(scheduler)
    assert old.num_generated == young.num_generated == 16 and old.num_preemptions == 0


def test_a_higher_priority_takes_the_slot_of_the_youngest_lower_one() -> None:
    """Guards interactive requests against waiting for a batch that fills all slots."""
    scheduler = make_scheduler(seqs=2, blocks=16)
    add(scheduler, make_request(0, 2, 20, priority=5), make_request(1, 2, 20, priority=5))
    step(scheduler)
    add(scheduler, make_request(2, 2, 20, priority=1))
    assert step(scheduler) == {2: 2, 0: 1}


def test_urgent_prompts_get_the_budget_before_a_batch() -> None:
    """Guards the first token of a chat beside a batch: its prompt takes all of a step, even with a limit."""
    for limit in (None, 2):
        scheduler = make_scheduler(blocks=32, budget=8)
        scheduler.prefill_limit = limit
        add(scheduler, *(make_request(n, 2, 20, priority=5) for n in range(2)))
        step(scheduler)
        add(scheduler, make_request(2, 18, 20, priority=1), make_request(3, 9, 1, priority=5))
        assert [step(scheduler) for _ in range(2)] == [{2: 8}, {2: 8}], f"limit {limit}"
        assert step(scheduler) == ({2: 2, 0: 1, 1: 1, 3: 4} if limit is None else {2: 2, 0: 1, 1: 1})


def test_prompts_keep_to_their_limit_beside_decoding_requests() -> None:
    """Guards the time of a step: all prompts share the limit, which holds only beside decoding requests."""
    scheduler = make_scheduler(blocks=40, budget=32, seqs=8)
    scheduler.prefill_limit = 5
    add(scheduler, *(make_request(n, 2, 4) for n in range(3)))
    assert step(scheduler) == {0: 2, 1: 2, 2: 2}
    add(scheduler, make_request(3, 40, 1), make_request(4, 40, 1))
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 5}
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 3, 4: 2}
    assert scheduler.held_back == {"slots": 0, "cache": 0, "budget": 0, "target": 1}
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 5}, "of two that are long, the one that is done sooner"
    assert step(scheduler) == {3: 27, 4: 5}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Guards the first token of short prompts: they are admitted at once and get half of each step."""
    scheduler = make_scheduler(blocks=400, budget=16, seqs=8)
    long, second, short = make_request(0, 800, 1), make_request(1, 400, 1), make_request(2, 20, 1)
    add(scheduler, long)
    step(scheduler)
    add(scheduler, second, short)
    assert step(scheduler) == {0: 8, 1: 8}
    assert step(scheduler) == {0: 8, 2: 8}
    assert step(scheduler) == {0: 8, 2: 8} and not short.num_generated
    assert step(scheduler)[2] == 4 and short.num_generated == 1


def test_a_long_prompt_advances_by_half_of_each_step() -> None:
    """Guards long prompts against starving, however many short ones come after them."""
    scheduler = make_scheduler(blocks=400, budget=17, seqs=8)
    scheduler.prefill_limit = 8
    add(scheduler, make_request(0, 2, 400), make_request(1, 400, 1))
    step(scheduler)
    start = scheduler.running[1].num_computed
    for number in range(2, 50):
        add(scheduler, make_request(number, 30, 1))
        assert step(scheduler)[1] == 4
    assert scheduler.running[1].num_computed == start + 48 * 4


def test_the_smallest_step_does_not_shrink() -> None:
    """Guards against steps without tokens, in which no request could advance."""
    scheduler = make_scheduler(seqs=1, budget=1)
    assert not scheduler.shrink(2) and scheduler.max_batch_tokens == scheduler.max_seqs == 1


def test_what_can_never_fit_is_refused() -> None:
    """Guards against a request that waits for ever, in the context and in the cache."""
    scheduler = make_scheduler(blocks=8, block_size=4)
    assert scheduler.sequence_limits.max_new_tokens(30) == 3 and scheduler.sequence_limits.max_new_tokens(32) == 1
    with pytest.raises(RequestError, match="KV cache holds 32"):
        scheduler.sequence_limits.max_new_tokens(33)
    with pytest.raises(RequestError, match="context of 1000"):
        scheduler.sequence_limits.max_new_tokens(1000)


def most_preempted(seed: int) -> int:
    """How often a request was preempted at most, among peers that are all expected to end at once."""
    random_ = random.Random(seed)
    scheduler = make_scheduler(blocks=40, block_size=4, seqs=16, budget=64)
    sequences = [make_request(n, random_.randint(1, 20), random_.randint(40, 100)) for n in range(40)]
    add(scheduler, *sequences)
    while scheduler.has_work:
        step(scheduler)
    return max(sequence.num_preemptions for sequence in sequences)


def test_peers_preempt_each_other_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against thrashing, however wrong the forecast; without the bound the same work must break it."""
    monkeypatch.setattr(OutputLengths, "remaining", lambda *_: 1)
    assert max(most_preempted(seed) for seed in range(5)) == MAX_PREEMPTIONS
    monkeypatch.setattr(AdmissionPolicy, "_fits_worst_case", lambda *_: True)
    assert max(most_preempted(seed) for seed in range(5)) > MAX_PREEMPTIONS


def test_requests_are_admitted_by_recent_output_lengths() -> None:
    """Guards against slots that stay empty for limits that no output reaches, and against admitting too many."""
    admitted = {}
    for length in (2, 400):
        scheduler = make_scheduler(blocks=100, block_size=4, seqs=32, budget=512)
        for _ in range(50):
            scheduler._admission.lengths.add(length)
        add(scheduler, *(make_request(n, 4, 300) for n in range(32)))
        admitted[length] = len(step(scheduler))
    assert admitted[2] == 32 and 3 < admitted[400] < 8


def test_remaining_is_the_mean_of_the_longer_ones() -> None:
    """Guards the estimate, its limit, and the default while no output has ended."""
    lengths = OutputLengths()
    assert lengths.remaining(0, 10_000) == PRIOR and lengths.remaining(300, 10_000) == 300
    for length in (10, 20, 60):
        lengths.add(length)
    assert [lengths.remaining(done, 10_000) for done in (0, 10, 20, 60, 100)] == [30, 30, 40, 60, 100]
    assert lengths.remaining(10, 15) == 5 and lengths.remaining(10, 10) == 0


def simulated_peak(used: int, growing: list[Growth], size: int) -> int:
    """The peak by simulation: each request takes one more block for each `size` tokens, from the first on."""
    most, alive, held = used, list(growing), used
    for step in range(max(one.tokens for one in growing) + 1):
        now = held + sum(-(-step // size) for _ in alive)
        most = max(most, now)
        ending = [one for one in alive if one.tokens == step]
        alive = [one for one in alive if one.tokens != step]
        held -= sum(one.blocks for one in ending)
    return most


def test_peak_is_that_of_a_simulation() -> None:
    """Guards the formula against a simulation."""
    random_ = random.Random(1)
    for _ in range(300):
        growing = [Growth(random_.randint(0, 40), random_.randint(1, 9)) for _ in range(random_.randint(1, 8))]
        used, size = sum(one.blocks for one in growing), random_.randint(1, 16)
        assert projected_peak(used, sorted(growing), size) == simulated_peak(used, growing, size)
    assert projected_peak(7, [], 4) == 7
