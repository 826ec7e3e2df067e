"""The dispatcher under whatever hypothesis generates, checked against its own books."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cbatch.batch.lines import Line
from cbatch.batch.row import Row
from cbatch.replicas import dispatcher as dispatcher_module
from cbatch.replicas.dispatcher import Affinity, Dispatcher, Work, beginnings

numbers = st.integers(0, 2)

MAX_SUSPECTS = 1
"""Of replicas with so few slots."""


def new_row(position: int, line: Line, begins: tuple[int, ...] = ()) -> Row:
    row = Row(position, line.index, beginnings=begins)
    row.line = line
    return row


class DispatcherMachine(RuleBasedStateMachine):
    """Everything that can happen to a dispatcher. What must hold is checked after each action."""

    @initialize(slots=st.lists(st.integers(1, 4), min_size=3, max_size=3))
    def begin(self, slots: list[int]) -> None:
        self.dispatcher = Dispatcher()
        self.slots = slots
        self.deaths: dict[int, int] = {}
        """Of the rows that are not finished."""
        self.begins: dict[int, tuple[int, ...]] = {}
        self.hands: dict[int, set[int]] = {}
        self.to_cancel: dict[int, list[int]] = {}
        self.was_given: set[int] = set()
        self.num_rows = self.num_finished = 0
        self.has_ended = False
        for number in range(3):
            self.join(number)

    @property
    def waiting(self) -> set[int]:
        return self.deaths.keys() - {index for hand in self.hands.values() for index in hand}

    @rule(begins=st.lists(st.sampled_from([(), (), (1,), (1, 2), (1, 3)]), min_size=1, max_size=9))
    def add(self, begins: list[tuple[int, ...]]) -> None:
        for row in begins if not self.has_ended else ():
            index = 10 * self.num_rows
            self.dispatcher.add(new_row(self.num_rows, Line(index, b"{}"), row))
            self.deaths[index], self.begins[index] = 0, row
            self.num_rows += 1

    @rule(rarely=st.integers(0, 4))
    def maybe_end_input(self, rarely: int) -> None:
        if not rarely:
            self.end_input()

    def end_input(self) -> None:
        self.dispatcher.end_input()
        self.has_ended = True

    @rule(number=numbers)
    def join(self, number: int) -> None:
        if number not in self.hands:
            self.dispatcher.join(number, self.slots[number])
            self.hands[number], self.to_cancel[number] = set(), []

    @rule(number=numbers)
    def take(self, number: int) -> None:
        if number in self.hands:
            before = set(self.hands[number])
            work = self.dispatcher.take(number)
            assert sorted(work.cancelled) == sorted(self.to_cancel[number]), "not told what to cancel"
            self.to_cancel[number] = []
            self.check(number, before, work)

    def check(self, number: int, before: set[int], work: Work) -> None:
        waiting, hand = self.waiting, self.hands[number]
        rows, failed = ([line.index for line in work.rows if bool(line.failure) is is_off] for is_off in (False, True))
        copies = [index for index in rows if index not in waiting]
        assert len(copies) == work.num_copies and not hand & {*rows, *failed}
        if copies:
            assert self.has_ended and not waiting and not before, "a copy although there is other work"
            assert all(self.deaths[index] == 0 for index in copies), "a copy of a row that was there at a death"
            assert all(sum(index in other for other in self.hands.values()) == 1 for index in copies), "two copies"
        if waiting and not before:
            assert rows or failed, "idle although rows wait"
        assert all(self.deaths[index] >= 3 for index in failed) and all(self.deaths[index] < 3 for index in rows)
        plain = [index for index in rows if not self.begins[index]]
        left = [index for index in waiting - {*rows} if not self.begins[index] and not self.deaths[index]]
        first_times = [index for index in plain if index not in self.was_given]
        assert first_times == sorted(first_times), "not in the order of the input"
        suspects = sum(self.deaths[index] == 1 for index in before | {*rows})
        if any(self.deaths[index] == 1 for index in rows):
            assert suspects <= MAX_SUSPECTS, "more rows that were there at a death than the next one may hit"
        if first_times:
            behind = any(self.deaths[index] == 1 for index in waiting - {*rows})
            assert suspects >= MAX_SUSPECTS or not behind, "given back, and overtaken by new rows"
            assert min(left, default=first_times[-1]) >= first_times[-1], "overtaken by later rows"
        hand |= {*rows, *failed}
        self.was_given |= hand
        assert len(hand - {*failed}) <= 2 * self.slots[number], "more than it has room for"
        if any(self.deaths[index] == 2 for index in hand):
            assert len(hand - {*failed}) == 1, "a row that was there at two deaths has company"
        for index in failed:
            self.answer(number, index)

    @rule(number=numbers, which=st.integers(0, 9), count=st.integers(1, 4))
    def finish(self, number: int, which: int, count: int) -> None:
        hand = sorted(self.hands.get(number, ()))
        for index in hand[which : which + count]:
            self.answer(number, index)

    @rule(number=numbers, which=st.integers(0, 30))
    def answer_late(self, number: int, which: int) -> None:
        """An answer for a row that this replica does not hold any more."""
        if which < self.num_rows and 10 * which in self.was_given:
            self.answer(number, 10 * which)

    def answer(self, number: int, index: int) -> None:
        found = self.dispatcher.finish(number, index)
        assert (found is not None) == (index in self.deaths), "lost or doubled"
        if found is None:
            return
        assert (found.index, found.position) == (index, index // 10)
        self.num_finished += 1
        del self.deaths[index]
        for other, hand in self.hands.items():
            if index in hand:
                hand.remove(index)
                if other != number:
                    self.to_cancel[other].append(index)

    @rule(number=numbers, restarts=st.sampled_from([True, True, False]))
    def die(self, number: int, restarts: bool) -> None:
        if number in self.hands:
            self.dispatcher.leave(number)
            for index in self.hands.pop(number):
                self.deaths[index] += 1
        if restarts:
            self.join(number)
            self.take(number)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "dispatcher"):
            assert len(self.dispatcher._rows) == len(self.deaths), "lost or doubled"
            for number, hand in self.hands.items():
                assert self.dispatcher.num_held(number) == len(hand)

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        self.end_input()
        for number in range(3):
            self.join(number)
        for _ in range(3 * self.num_rows + 9):
            for number in range(3):
                self.take(number)
                self.finish(number, 0, 1)
            self.counts_agree()
        assert self.num_finished == self.num_rows and not self.deaths, "rows wait for ever"
        for index in self.was_given:
            self.answer(0, index)  # which comes too late


QUICK = settings(
    max_examples=60,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def test_invariants_hold_under_all_actions() -> None:
    """Guards every row against being lost or doubled, good rows against poison, and the order of the input."""
    run_state_machine_as_test(DispatcherMachine, settings=QUICK)


def forget_rows(self: Dispatcher, number: int) -> None:
    """Loses what a dead replica had."""
    for index in self._hands.pop(number).rows:
        self._rows[index].holders.remove(number)
        self._rows[index].deaths += 1


def accept_doubles(self: Dispatcher, number: int, index: int) -> Any:
    """Takes the answer of a second replica for another row."""
    return finish(self, number, index) or (new_row(index // 10, Line(index, b"{}")), 0.0)


finish = Dispatcher.finish


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (Dispatcher, "leave", forget_rows),
        (Dispatcher, "finish", accept_doubles),
        (dispatcher_module._Hand, "max_suspects", property(lambda self: 9)),  # gives one replica all of them
    ],
    ids=["forget_rows", "accept_doubles", "give_all_suspects"],
)
def test_planted_faults_are_seen(owner: type, method: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test itself: it finds these faults."""
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            DispatcherMachine, settings=settings(QUICK, phases=[Phase.generate], max_examples=400)
        )


def rows_of(dispatcher: Dispatcher, number: int) -> list[int]:
    return [line.index for line in dispatcher.take(number).rows]


def started(*slots: int) -> Dispatcher:
    dispatcher = Dispatcher()
    for number, of_replica in enumerate(slots):
        dispatcher.join(number, of_replica)
    return dispatcher


def add(dispatcher: Dispatcher, rows: int, *, prompt: str = "", start: int = 0) -> None:
    for index in range(start, start + rows):
        line = Line(index, b'{"id": "%d", "prompt": "%s row %d"}' % (index, prompt.encode(), index))
        dispatcher.add(new_row(index, line, beginnings(line)))


def test_few_rows_are_spread_over_all_replicas() -> None:
    """Guards the last rows of an input, and a short input, against one replica that takes all of them."""
    dispatcher = started(4, 4, 4)
    add(dispatcher, 9)
    assert [len(rows_of(dispatcher, number)) for number in range(3)] == [3, 3, 3]
    add(dispatcher, 100, start=9)
    assert [len(rows_of(dispatcher, number)) for number in range(3)] == [5, 5, 5]


def test_rows_that_begin_alike_meet_in_one_replica() -> None:
    """Guards the prefix caches against prompts of one document that go to every replica."""
    dispatcher = started(4, 4)
    add(dispatcher, 8, prompt="a" * 600)
    add(dispatcher, 8, prompt="b" * 600, start=8)
    assert rows_of(dispatcher, 0) == [*range(8)]
    assert rows_of(dispatcher, 1) == [*range(8, 16)]
    for number, start in ((0, 0), (1, 8)):
        for index in range(start, start + 2):
            dispatcher.finish(number, index)
    add(dispatcher, 2, prompt="b" * 600, start=16)
    add(dispatcher, 20, prompt="a" * 600, start=18)
    assert rows_of(dispatcher, 1) == [16, 17] and rows_of(dispatcher, 0) == [18, 19]


def test_a_poison_row_takes_few_others_with_it() -> None:
    """Guards good rows against running alone, one after the other, because one row kills replicas."""
    dispatcher = started(64, 64)
    add(dispatcher, 300)
    assert rows_of(dispatcher, 0) == [*range(128)]  # row 0 kills it
    dispatcher.leave(0)
    dispatcher.join(0, 64)
    given = rows_of(dispatcher, 1)
    assert given[:8] == [*range(8)] and given[8:] == [*range(128, 206)]
    dispatcher.leave(1)  # row 0 again; so 8 rows may be the reason
    dispatcher.join(1, 64)
    alone = [rows_of(dispatcher, 1)]
    for row in range(8):
        assert alone[-1] == [row] and dispatcher.runs_alone(1)
        dispatcher.finish(1, row)
        alone.append(rows_of(dispatcher, 1))
    assert alone[-1][:8] == [*range(128, 136)] and alone[-1][8] == 206  # 8 of those that were there at its second death
    assert rows_of(dispatcher, 0)[:8] == [*range(136, 144)]


def test_a_free_slot_goes_before_affinity() -> None:
    """Guards a replica with free slots against waiting while another one has more than it can run."""
    dispatcher = started(4, 4)
    add(dispatcher, 8, prompt="a" * 600)
    assert len(rows_of(dispatcher, 0)) == 4
    add(dispatcher, 30, prompt="a" * 600, start=8)
    assert len(rows_of(dispatcher, 0)) == 4
    assert len(rows_of(dispatcher, 1)) == 8  # once it has served one, it has the beginning too


def test_beginnings_of_a_line() -> None:
    """Guards the affinity against ids in front of the prompt, and short prompts against any."""
    texts = ["x" * 600 + "1", "x" * 600 + "2", "y" * 600]
    one, two, other = (
        beginnings(Line(0, b'{"id": %d, "prompt": "%s"}' % (len(text), text.encode()))) for text in texts
    )
    assert one == two != other and len(one) == 1
    assert beginnings(Line(0, b'{"prompt": "short"}')) == () == beginnings(Line(0, None))
    assert len(beginnings(Line(0, b"z" * 200_000))) == 8


def test_the_least_recent_beginnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory against an input in which every prompt is long and different."""
    monkeypatch.setattr(dispatcher_module, "MAX_BEGINNINGS", 4)
    affinity = Affinity()
    for beginning in range(9):
        affinity.note((beginning,), 1)
    assert [affinity.is_elsewhere((beginning,), 0) for beginning in range(9)] == [False] * 5 + [True] * 4


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory of a message against rows that are large; one row is always sent."""
    monkeypatch.setattr(dispatcher_module, "MAX_MESSAGE_BYTES", 250)
    dispatcher = started(4)
    for index in range(4):
        dispatcher.add(new_row(index, Line(index, b"x" * (300 if index == 3 else 100))))
    assert [rows_of(dispatcher, 0) for _ in range(3)] == [[0, 1], [2], [3]]
