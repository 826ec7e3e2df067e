"""The order of waiting requests: nothing is lost, and who goes next."""

from __future__ import annotations

import random

from cbatch.batch.feed import LEAST_BEGINNING, WorkOrder, beginning_of
from cbatch.batch.row import Row
from tests.support.queued_requests import encoded, queued


def taken(order: WorkOrder, max_turn: int = 1) -> list[int]:
    """Positions of the requests that are left, in the order in which they go."""
    return [order.take(max_turn).position for _ in range(len(order))]


def document(number: int, question: int) -> list[int]:
    """A prompt of 80 tokens that begins with one of several documents."""
    return [number] * 70 + [question] * 10


def test_the_oldest_goes_first_until_they_are_sorted() -> None:
    """Guards the first results against waiting, and the order of requests with equal work."""
    order = WorkOrder()
    for position, limit in enumerate([3, 9, 3, 20, 9]):
        order.add(queued(position, limit=limit))
    assert order.take(1).position == 0
    order.sort(lambda request: request.limit)
    order.add(queued(5, limit=99))  # comes late, as a row that waited for another one's answer
    assert taken(order) == [3, 1, 4, 2, 5]


def test_lower_priorities_go_first_however_they_are_sorted() -> None:
    """Guards `priority` against the work of a row."""
    order = WorkOrder()
    for position, (priority, limit) in enumerate([(0, 9), (5, 99), (0, 20), (-1, 1)]):
        order.add(queued(position, encoded(priority=priority), limit=limit))
    assert order.first_priority == -1
    order.sort(lambda request: request.limit)
    assert taken(order) == [3, 2, 0, 1]


def test_requests_that_begin_alike_follow_each_other() -> None:
    """Guards prefix hits in a small cache, and the others against waiting for a beginning that never ends."""
    order = WorkOrder()
    for position in range(9):
        order.add(queued(position, encoded(document(position % 3, position))))
    order.add(queued(9))  # begins like nothing else
    assert [order.take(2).position for _ in range(4)] == [0, 3, 1, 4]
    assert taken(order, 9) == [7, 2, 5, 8, 6, 9]


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
