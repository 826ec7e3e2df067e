"""Load with many users: every figure is known on a simulated clock and engine."""

from __future__ import annotations

import heapq
import itertools
import queue
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.base.errors import ConfigError, RequestError
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import EventCallback, Request
from cbatch.cli.bench.load import Capacity, expected_arrivals, find_capacity, medians, most_served, remarks, run_rounds
from cbatch.cli.bench.options import parse_duration
from cbatch.cli.bench.users import SLO, Figures, Scenario, Turn, User, run_load
from cbatch.cli.bench.workload import LengthDistribution

EASY_SLO = SLO(ttft_s=1.0, tps=4.0)


class Even(random.Random):
    """A generator without chance as to time: every pause is as long as the mean."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd


class SimulatedEngine:
    """A clock, and an engine: the first token of an answer comes late, the others evenly."""

    def __init__(self, ttft: float = 0.5, tpot: float = 0.25) -> None:
        self.time = 0.0
        self.ttft: Callable[[int], float] = lambda number: ttft
        self.tpot, self.submit_takes = tpot, 0.0
        self.fails: Callable[[int], bool] = lambda number: False
        self.asked: list[SimpleNamespace] = []
        self.cancelled: list[SimpleNamespace] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def wait(self, inbox: queue.SimpleQueue[Turn], timeout: float) -> Turn | None:
        end = self.time + timeout
        while inbox.empty() and self._events and self._events[0][0] <= end:
            when, _, happen = heapq.heappop(self._events)
            self.time = max(self.time, when)
            happen()
        if not inbox.empty():
            return inbox.get()
        self.time = end
        return None

    def submit(self, request: Request, on_event: EventCallback) -> None:
        self.time += self.submit_takes
        number, length, prompt = len(self.asked), request.params.max_tokens, list(request.prompt_ids)
        made = SimpleNamespace(number=number, prompt=prompt, request=request, at=self.time, on_event=on_event)
        self.asked.append(made)
        for place in range(length):
            when = self.time + self.ttft(number) + place * self.tpot
            happen = partial(self._token, made, place, place == length - 1)
            heapq.heappush(self._events, (when, next(self._order), happen))

    def cancel(self, request: Request) -> None:
        self.cancelled += [made for made in self.asked if made.request is request]

    def _token(self, made: SimpleNamespace, place: int, is_last: bool) -> None:
        if not self.fails(made.number):
            made.on_event(TokenEvent(made.number, 50 + place, finish_reason="length" if is_last else None))
        elif place == 0:
            error = RequestError("internal_error", "out of luck")
            made.on_event(TokenEvent(made.number, None, finish_reason="error", error=error))


def scenario(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "users": 2,
        "rate": 1.0,
        "duration_s": 9.6,
        "think_s": 1.0,
        "inputs": LengthDistribution(4, 4, "fixed"),
        "outputs": LengthDistribution(5, 5, "fixed"),
        "vocabulary": 1000,
        "context": 100,
    }
    return Scenario(**settings | changes)


def run(simulation: SimulatedEngine, slo: SLO = EASY_SLO, **changes: Any) -> Figures:
    return run_load(simulation, scenario(**changes), slo, simulation, Even)


def load(simulation: SimulatedEngine, slo: SLO = EASY_SLO, **changes: Any) -> SimpleNamespace:
    """The figures of a load."""
    return SimpleNamespace(**run(simulation, slo, **changes))


def test_every_figure() -> None:
    """Guards arrival, thinking and all that is counted: users come at 1 and 2 s and ask again every 2.5 s."""
    simulation = SimulatedEngine()
    result = run(simulation)
    assert [made.at for made in simulation.asked] == [1, 2, 3.5, 4.5, 6, 7, 8.5, 9.5]
    assert result == {
        "users": 2,
        "users_judged": 2,
        "answers": 6,
        "cut_off": 2,
        "errors": 0,
        "first_error": "",
        "ttft_s": {"p50": 0.5, "p90": 0.5, "p99": 0.5},
        "tpot_s": {"p50": 0.25, "p90": 0.25, "p99": 0.25},
        "prompt_tokens": 8 * 4,
        "cached_tokens": 0,
        "output_tokens": 6 * 5 + 3,
        "elapsed_s": 9.6,
        "worst_lag_s": 0.0,
        "users_missing": 0,
        "users_served_share": 1.0,
        "answers_served_share": 1.0,
        "output_tokens_per_s": pytest.approx(33 / 9.6),
    }
    for slo in (SLO(0.4, 4.0), SLO(1.0, 5.0)):  # the first token is too late, or those after it are
        bad = load(SimulatedEngine(), slo)
        assert bad.users_served_share == bad.answers_served_share == 0
    late = run(SimulatedEngine(ttft=100.0), SLO(0.05, 4.0))
    assert late["ttft_s"]["p50"] == pytest.approx((8.6 + 7.6) / 2)


def test_one_late_answer_is_one_user_less() -> None:
    """Guards the difference between users and answers: a user is served if all of their answers are."""
    simulation = SimulatedEngine()
    simulation.ttft = lambda number: 2.0 if number == 3 else 0.5
    result = load(simulation)
    assert [made.at for made in simulation.asked] == [1, 2, 3.5, 4.5, 6, 8.5, 8.5]
    assert (result.answers, result.answers_served_share) == (5, 0.8)
    assert (result.users_judged, result.users_served_share) == (2, 0.5)
    assert result.ttft_s["p99"] == pytest.approx(2.0, abs=0.1)


def test_users_without_an_answer_count() -> None:
    """Guards against good figures of an engine that hangs: users who have waited too long count, newcomers do not."""
    simulation = SimulatedEngine(ttft=1000.0)
    result = load(simulation, users=9, duration_s=9.25)
    assert result.users == 9 and result.cut_off == 9
    assert (result.users_judged, result.users_served_share) == (8, 0.0)
    assert result.ttft_s["p50"] == 4.75 and result.tpot_s["p50"] is None
    assert result.output_tokens == 0


def test_a_stream_that_stalls_counts() -> None:
    """Guards against an answer that is cut off in a stall: it was behind by then already."""
    stalled, lately = (Turn(User(0, random.Random()), Request(), asked) for asked in (0.0, 9.0))
    for answer, first in ((stalled, 0.5), (lately, 9.5)):
        answer.take(TokenEvent(1, 7), first)
    assert stalled.meets(EASY_SLO, 10.0) is False
    assert lately.meets(EASY_SLO, 9.7) is None and lately.meets(EASY_SLO, 9.76) is False, "four tokens a second"


@pytest.mark.parametrize(
    ("turns", "context", "sizes"), [(3, 100, [4, 13, 22, 4]), (100, 18, [4, 13, 4, 13])], ids=["ends", "is full"]
)
def test_a_conversation_keeps_what_was_said(turns: int, context: int, sizes: list[int]) -> None:
    """Guards turns: each prompt is the conversation so far and a question, until its last turn or the context's end."""
    simulation = SimulatedEngine()
    load(simulation, users=1, duration_s=14.0, turns=turns, context=context)
    prompts = [made.prompt for made in simulation.asked[:4]]
    assert list(map(len, prompts)) == sizes
    for before, after in itertools.pairwise(prompts):
        if len(after) > 4:
            assert after[: len(before) + 5] == [*before, 50, 51, 52, 53, 54]
    assert len({tuple(prompt[-4:]) for prompt in prompts}) == 4


def test_lengths_that_do_not_fit() -> None:
    """Guards a run against an engine that refuses every question."""
    with pytest.raises(ConfigError, match=r"Questions of 4 and answers of 5 tokens are 9 together.* hold 8\."):
        load(SimulatedEngine(), context=8)


def test_a_load_that_comes_late_is_seen() -> None:
    """Guards against a load that is silently less than intended."""
    simulation = SimulatedEngine()
    simulation.submit_takes = 0.5
    assert load(simulation, users=3, rate=100.0, duration_s=1.2).worst_lag_s == pytest.approx(1.01 - 0.03)


def test_an_error_ends_its_user() -> None:
    """Guards against a storm of questions to an engine that has failed; the run ends when no user is left."""
    simulation = SimulatedEngine()
    simulation.fails = lambda number: True
    result = load(simulation, duration_s=1000.0)
    assert len(simulation.asked) == 2 and result.elapsed_s == 2.5
    assert (result.errors, result.users_served_share) == (2, 0.0) and "out of luck" in result.first_error
    assert simulation.cancelled == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_unfinished_is_cancelled(interrupted: bool) -> None:
    """Guards the run after this one, also after Ctrl-C, and the figures against the step that was in flight."""

    class Late(SimulatedEngine):
        def cancel(self, request: Request) -> None:
            super().cancel(request)
            self.cancelled[-1].on_event(TokenEvent(self.cancelled[-1].number, 1, finish_reason="length"))

        def wait(self, inbox: queue.SimpleQueue[Turn], timeout: float) -> Turn | None:
            if interrupted and len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().wait(inbox, timeout)

    simulation = Late()
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            load(simulation)
        assert len(simulation.cancelled) == 2
    else:
        result = load(simulation)
        assert sorted(made.number for made in simulation.cancelled) == [6, 7]
        assert (result.output_tokens, result.cut_off, result.answers) == (33, 2, 6)


def made(p99: float | None = 1.0, **changes: Any) -> Figures:
    """Figures of a load, some of them changed."""
    return run(SimulatedEngine()) | {"ttft_s": {"p50": 0.1, "p90": 0.2, "p99": p99}} | changes


@pytest.mark.parametrize(
    ("capacity", "most", "tried"),
    [
        (37, 4096, [1, 2, 4, 8, 16, 32, 36, 37, 38, 40, 48, 64]),
        (1, 4096, [1, 2]),
        (0, 4096, [1]),
        (5, 4096, [1, 2, 4, 5, 6, 8]),
        (10**9, 50, [1, 2, 4, 8, 16, 32, 50]),
        (49, 50, [1, 2, 4, 8, 16, 32, 41, 45, 47, 48, 49, 50]),
    ],
)
def test_the_search_finds_the_most(capacity: int, most: int, tried: list[int]) -> None:
    """Guards doubling and bisection, and a fast engine against an endless search; within a tenth takes less time."""
    asked: list[int] = []

    def measure(users: int) -> Figures:
        asked.append(users)
        return made(users_served_share=1.0 if users <= capacity else 0.9899)

    found = find_capacity(measure, most=most, precision=0.0)
    assert (found, sorted(asked)) == (Capacity(min(capacity, most), capacity > most), tried)
    asked.clear()
    about = find_capacity(measure, most=most, precision=0.1)
    assert 0.9 * found.users <= about.users <= found.users and len(asked) <= len(tried)


def test_probes_that_are_too_short() -> None:
    """Guards against a capacity of 0 when no answer could be judged."""
    with pytest.raises(ConfigError, match="use a longer --duration"):
        find_capacity(lambda users: run(SimulatedEngine(), users=users, duration_s=1.2))


def test_durations() -> None:
    """Guards durations as people write them; without a unit one is ambiguous."""
    written = {"500ms": 0.5, "2s": 2, " 1.5m ": 90, "1h": 3600, "0 s": 0}
    assert {text: parse_duration(text) for text in written} == written
    for text in ("", "2", "s", "-1s", "2 days", "1e3s", "1m30s"):
        with pytest.raises(ValueError, match="is not a duration; write it as 500ms, 2s or 1m"):
            parse_duration(text)


def test_users_who_never_came_are_told() -> None:
    """Guards figures of fewer users than were asked for, too slow a program, and answers that failed in any round."""
    asked = scenario(users=128, rate=4.0, duration_s=20.0)
    simulation = SimulatedEngine()
    result = run_load(simulation, asked, EASY_SLO, simulation, Even)
    assert (result["users"], result["users_missing"]) == (79, 49)  # the 80th would come at the end
    warning = expected_arrivals(asked)
    assert "about 80 of 128 users will arrive in 20 s at 4 a second" in warning
    assert "--rate 13 or --duration 64s" in warning
    assert expected_arrivals(scenario(users=80, rate=4.0, duration_s=20.0)) == ""
    assert remarks(scenario(), {2: [run(SimulatedEngine())]}, is_search=False) == []
    bad = made(worst_lag_s=0.5, first_error="NaN in the logits.")
    missing, *others = remarks(asked, {128: [result, bad]}, is_search=False)
    assert missing.startswith("Only 79 of 128 users arrived, so these are not the figures of 128 users. --rate 13")
    assert others == [
        "Some answers failed: NaN in the logits.",
        "Questions were asked up to 0.50 s late, so the load was less than intended.",
    ]


def test_figures_of_several_runs() -> None:
    """Guards the median: neither the best nor the worst first tokens, and none as the worst; and a curve's capacity.

    That is the most users before the first number that is not served.
    """
    runs = [made(3.0), made(1.0), made(2.0)]
    found = medians({3: runs, 2: runs[:2], 1: [runs[1], made(None), runs[0]]})
    assert list(found) == [1, 2, 3] and found[3] is runs[2] and found[2] is runs[0] and found[1] is runs[0]
    served = {1: 1.0, 8: 0.995, 32: 0.9, 128: 1.0}
    probes = {users: made(users_served_share=share) for users, share in served.items()}
    assert most_served(probes) == (8, False)
    assert most_served({1: probes[32]}) == (0, False) and most_served({1: probes[1]}) == (1, True)


def test_rounds_take_turns() -> None:
    """Guards the curve: every round has all numbers of users, with prompts of its own."""
    simulation, told = SimulatedEngine(), list[str]()
    probes = [scenario().probe(users, 8.0) for users in (1, 3)]
    found = run_rounds(simulation, probes, EASY_SLO, 3, told.append, simulation)
    assert [len(found[users]) for users in (1, 3)] == [3, 3]
    assert sorted(told[:2]) == ["round 1 of 3: 1 user for 8 s", "round 1 of 3: 3 users for 8 s"]
    prompts = [tuple(made.prompt) for made in simulation.asked]
    assert len(prompts) == len(set(prompts)) > 12, "the prefix cache would know prompts of earlier rounds"
