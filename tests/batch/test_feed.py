"""Which row of a batch goes next, how many the engine has of them, and how long outputs probably get."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.base.outputs import TokenEvent
from cbatch.base.request import EventCallback, Request
from cbatch.batch.feed import (
    LEAST_BEGINNING,
    LEAST_SAMPLES,
    EngineFeed,
    OutputForecast,
    WorkOrder,
    beginning_of,
    ends_by_limit,
)
from cbatch.batch.row import Row
from cbatch.schedule.admission import PRIOR
from tests.support.queued_requests import encoded, queued


def test_kinds_of_rows_are_told_apart() -> None:
    """Guards a file of labels and essays: the many short outputs say nothing about the long ones."""
    forecast, label, essay = OutputForecast(), encoded(30), encoded(30)
    assert forecast.remaining(label, 10) == 10 and forecast.remaining(essay, 1000) == PRIOR
    for _ in range(LEAST_SAMPLES):
        forecast.observe(label, 10, 3)
    assert forecast.remaining(label, 10) == 3 and forecast.remaining(essay, 1000) == PRIOR
    for length in (400, 600) * (LEAST_SAMPLES // 2):
        forecast.observe(essay, 1000, length)
    assert forecast.remaining(essay, 1000) == 500 and forecast.remaining(essay, 1000, 450) == 150
    assert forecast.remaining(label, 10, 2) == 1


def test_prompts_tell_if_outputs_follow_them() -> None:
    """Guards translations and the like, whose outputs are as long as their prompts; the others share what is known."""
    forecast = OutputForecast()
    for size in (20, 200) * LEAST_SAMPLES:
        forecast.observe(encoded(size), 500, size)
    assert [forecast.remaining(encoded(size), 500) for size in (17, 250, 2000)] == [20, 200, 110]


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, True), ({"stop": "x"}, False), ({"stop_token_ids": 3}, False), ({"regex": "a+"}, False)],
)
def test_outputs_that_only_their_limit_ends(params: dict[str, object], expected: bool) -> None:
    """Guards exact knowledge against what other rows do."""
    request = encoded(ignore_eos=True, **params)
    assert ends_by_limit(request.params) is expected and not ends_by_limit(encoded(**params).params)
    forecast = OutputForecast()
    for _ in range(LEAST_SAMPLES):
        forecast.observe(request, 100, 7)
    assert forecast.remaining(request, 100, 5) == (95 if expected else 2)


def taken(order: WorkOrder, max_turn: int = 1) -> list[int]:
    """Positions of the requests that are left, in the order in which they go."""
    return [order.take(max_turn).position for _ in range(len(order))]


def document(number: int, question: int) -> list[int]:
    """A prompt of 80 tokens that begins with one of several documents."""
    return [number] * 70 + [question] * 10


def test_what_prompts_have_in_common() -> None:
    """Guards against taking prompts for alike that only begin with the same few words."""
    same = list(range(LEAST_BEGINNING))
    assert beginning_of(same[:-1]) is None
    assert beginning_of([*same, 1]) == beginning_of([*same, 2, 3]) != beginning_of([9, *same])
    assert beginning_of([*same, *same]) != beginning_of(same)  # a longer prompt is compared further


def test_nothing_is_lost_or_given_twice() -> None:
    """Guards the bookkeeping, in random orders of all calls."""
    for seed in range(60):
        source, order = random.Random(seed), WorkOrder()
        waiting: dict[int] = {}
        gone: list[Row] = []
        for position in range(80):
            action = source.choice("aaatrs")
            if action == "a":
                prompt = document(source.randrange(3), position) if source.random() < 0.7 else 5
                waiting[position] = queued(position, encoded(prompt, source.randrange(2)), source.randrange(1, 9))
                order.add(waiting[position])
            elif action == "t" and waiting:
                request = order.take(source.randrange(1, 4))
                assert request.request.priority == min(one.request.priority for one in waiting.values())
                gone.append(waiting.pop(request.position))
            elif action == "r" and waiting:
                gone.append(waiting.pop(source.choice(list(waiting))))
                assert order.remove(gone[-1])
            elif action == "s":
                order.sort(lambda request: request.limit)
            assert len(order) == len(waiting)
            assert not any(order.remove(request) for request in gone)
        assert sorted(taken(order, 3)) == sorted(waiting)


class FakeEngineThread:
    """Takes requests, and computes nothing."""

    def __init__(self, max_seqs: int = 4, capacity: int = 10**6) -> None:
        scheduler = SimpleNamespace(max_seqs=max_seqs, pool=SimpleNamespace(capacity=capacity))
        self.engine = SimpleNamespace(scheduler=scheduler)
        self.submitted: list[Request] = []
        self.cancelled: list[Request] = []

    def submit(self, request: Request, on_event: EventCallback) -> None:
        self.submitted.append(request)

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)


class Feed:
    """A feed, and what went through it by position."""

    def __init__(self, max_seqs: int = 4, capacity: int = 10**6, *, reorders: bool = True) -> None:
        self.thread: Any = FakeEngineThread(max_seqs, capacity)
        self.feed = EngineFeed(self.thread, OutputForecast(), lambda row, event: None, reorders=reorders)
        self.requests: dict[int, Row] = {}

    def put(self, position: int, limit: int = 8, tokens: int = 0, **request: Any) -> Row:
        made = self.requests[position] = queued(position, encoded(**request), limit, tokens)
        self.feed.put(made)
        return made

    @property
    def given(self) -> list[int]:
        places = {one.request: position for position, one in self.requests.items()}
        return [places[request] for request in self.thread.submitted]

    def finish_all(self) -> list[int]:
        """Ends what is in the engine, the oldest first, until nothing is left; returns the order of all."""
        ended = 0
        while ended < len(self.given):
            self.feed.output_ended(self.given[ended])
            ended += 1
        return self.given


def test_the_engine_gets_a_few_more_than_it_runs() -> None:
    """Guards slots against staying free, and the order of what is still here against being decided too early."""
    feed = Feed(max_seqs=4)
    for position in range(9):
        feed.put(position)
    assert feed.given == [0, 1, 2, 3, 4]
    feed.feed.output_ended(2)
    feed.feed.output_ended(2)
    assert feed.given[5:] == [5]
    assert feed.finish_all() == list(range(9))


def test_all_outputs_of_a_request_count() -> None:
    """Guards against filling the engine with rows of many outputs each."""
    feed = Feed(max_seqs=4)
    for position in range(4):
        feed.put(position, n=3)
    assert feed.given == [0, 1]
    feed.feed.output_ended(0)
    assert feed.given == [0, 1]
    feed.feed.output_ended(0)
    assert feed.given == [0, 1, 2]  # although the first row has an output that goes on


def test_most_work_first_once_the_input_has_ended() -> None:
    """Guards the tail: long outputs and long prompts go first, then what may get longer; and not before the end."""
    for reorders in (True, False):
        feed = Feed(max_seqs=1, reorders=reorders)
        limits = [5, 5, 5, 300, 20, 90]
        for position, limit in enumerate(limits):
            feed.put(position, limit)
        feed.put(6, 5, prompt=400)
        feed.put(7, 400)  # as long as 300, as far as anybody knows, or longer
        assert feed.given == [0, 1]
        feed.feed.end_input()
        assert feed.finish_all() == ([0, 1, 7, 3, 5, 6, 4, 2] if reorders else list(range(8)))


def test_a_more_urgent_request_is_not_held() -> None:
    """Guards `priority`: the engine preempts others for such a request, so it must know of it."""
    feed = Feed(max_seqs=2)
    for position in range(5):
        feed.put(position)
    feed.put(5, priority=-1)
    feed.put(6, priority=-1)
    feed.put(7, priority=3)
    assert feed.given == [0, 1, 2, 5, 6]


def test_a_row_that_goes_on_does_not_wait() -> None:
    """Guards rows whose tools have run, or whose answer was not good, against the end of the queue."""
    feed = Feed(max_seqs=1)
    for position in range(4):
        feed.put(position)
    feed.feed.output_ended(0)
    again = feed.requests[0] = queued(0)
    feed.feed.put(again, goes_on=True)
    assert feed.thread.submitted[-1] is again.request


def test_alike_beginnings_follow_each_other_only_in_a_small_cache() -> None:
    """Guards prefix hits where the cache forgets, and the order of the input where it does not."""
    for capacity, expected in ((10**6, list(range(12))), (100, [0, 1, 4, 7, 10, 2, 5, 8, 11, 3, 6, 9])):
        feed = Feed(max_seqs=1, capacity=capacity)
        for position in range(12):
            feed.put(position, tokens=90, prompt=[position % 3] * 90)
        if capacity == 100:
            feed.thread.engine.scheduler.max_seqs = 4
        assert feed.finish_all() == expected


def test_an_engine_that_refuses_at_once_does_not_recurse() -> None:
    """Guards a closed engine, which ends each request within `submit`, with thousands of rows waiting."""
    feed = Feed(max_seqs=1)
    for position in range(3000):
        feed.put(position)
    refuse = feed.thread.submit

    def submit(request: Request, on_event: EventCallback) -> None:
        refuse(request, on_event)
        feed.feed.output_ended(len(feed.thread.submitted) - 1)

    feed.thread.submit = submit
    feed.feed.output_ended(0)
    assert len(feed.thread.submitted) == 3000


def test_cancelling() -> None:
    """Guards against computing what nobody wants: held requests never begin, the engine's make room."""
    feed = Feed(max_seqs=1)
    held = [feed.put(position) for position in range(5)]
    feed.feed.cancel(held[3])
    feed.feed.cancel(held[0])
    assert feed.thread.cancelled == [held[0].request]
    assert feed.finish_all() == [0, 1, 2, 4]
    feed.feed.close()
    feed.put(9)
    assert 9 not in feed.given
    late = feed.requests[10] = queued(10)
    feed.feed.put(late, goes_on=True)
    assert feed.thread.cancelled[-1] is late.request  # what is in flight may have been cancelled before it came


def test_what_is_ahead() -> None:
    """Guards the time left: tokens of prompts that have not begun, likely and most tokens of outputs."""
    feed = Feed(max_seqs=1)
    feed.put(0, 50, prompt=30, ignore_eos=True)
    feed.put(1, 400, prompt=70)
    feed.put(2, 20, prompt=10, n=2, ignore_eos=True)
    for _ in range(5):
        feed.requests[0].outputs.take(TokenEvent(0, 3))
    feed.requests[2].outputs.take(TokenEvent(2, 3, finish_reason="stop", sample_index=1))
    ahead = feed.feed.ahead(list(feed.requests.values()))
    assert (ahead.rows, ahead.prompt_tokens, ahead.prompts_to_come) == (3, 110, 70)
    assert (ahead.output_tokens, ahead.longest_likely, ahead.longest) == (45 + 256 + 20, 256, 400)
    feed.feed.end_input()
    assert not feed.feed.ahead([]).is_last
    feed.feed.output_ended(0)
    assert feed.feed.ahead([]).is_last and not ahead.is_last
