"""Many users at once: how soon and how fast each of them is answered, and how many there may be.

Users arrive one after the other, whatever the engine is doing. Each asks, reads the answer as it streams, thinks, and
asks again. One thread does it for all of them, from a heap of what is due; answers come in on the driver's thread.
"""

from __future__ import annotations

import heapq
import queue
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cbatch.cli.bench.load.users import SLO, Scenario, Turn, User
from cbatch.cli.run.stats import percentiles
from cbatch.engine import ConfigError, SamplingParams

if TYPE_CHECKING:
    from cbatch.engine import EngineThread, TokenEvent


class Clock(Protocol):
    """The time, and waiting in it."""

    def now(self) -> float:
        """Seconds since some moment. Called on any thread."""

    def wait(self, inbox: queue.SimpleQueue[Turn], timeout: float) -> Turn | None:
        """The next answer that ends, or None after some seconds."""


class RealClock:
    """The time of this machine."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, inbox: queue.SimpleQueue[Turn], timeout: float) -> Turn | None:
        try:
            return inbox.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How users were served. Times in seconds; shares are None where nothing can be judged.

    users, users_judged:     who arrived, and those with an answer that counts
    users_served:            the share of users all of whose answers kept the level
    answers, answers_served: answers that count, and the share that kept the level. One that was cut off at the end
                             counts where it was late by then already.
    cut_off:                 answers that were cut off at the end
    ttft_s:                  seconds to the first token; where it was late and did not come, the time until the end
    tpot_s:                  seconds a token after the first, of an answer
    worst_lag_s:             how late a question was asked at most. Where it is long, this program was too slow
                             to make the load, and the load was less than was asked for.
    """

    users: int
    users_judged: int
    users_served: float | None
    answers: int
    answers_served: float | None
    cut_off: int
    errors: int
    first_error: str
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    elapsed_s: float
    worst_lag_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


def run_load(
    engine_thread: EngineThread,
    scenario: Scenario,
    slo: SLO,
    clock: Clock | None = None,
    rng: Callable[[str], random.Random] = random.Random,
) -> LoadResult:
    """Lets users ask a driver until the time is over, and cancels what is unfinished then. An error ends its user.

    chance: makes a source of randomness from a seed
    Raises ConfigError where a question would not fit the context.
    """
    scenario.check()
    run = _Run(engine_thread, scenario, clock or RealClock(), rng)
    try:
        run.go()
    finally:
        run.cancel()
    return run.result(slo)


class _Run:
    """One run: who is due when, and who waits for an answer."""

    def __init__(
        self, engine_thread: EngineThread, scenario: Scenario, clock: Clock, rng: Callable[[str], random.Random]
    ) -> None:
        self._engine_thread, self._scenario, self._clock = engine_thread, scenario, clock
        self._inbox: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._waiting: set[Turn] = set()
        self._users: list[User] = []
        self._worst_lag = 0.0
        self._is_over = False
        self._began = self._end = clock.now()
        self._due: list[tuple[float, int]] = []
        arrivals, when = rng(f"{scenario.seed}/arrivals"), self._began
        for number in range(scenario.users):
            when += arrivals.expovariate(scenario.rate)
            self._due.append((when, number))
            self._users.append(User(number, rng(f"{scenario.seed}/{number}")))

    def go(self) -> None:
        """Asks what is due and takes what comes, until the time is over or nobody is left."""
        end = self._began + self._scenario.duration_s
        while (now := self._clock.now()) < end and (self._due or self._waiting):
            if self._due and self._due[0][0] <= now:
                due, number = heapq.heappop(self._due)
                self._worst_lag = max(self._worst_lag, now - due)
                self._ask(self._users[number])
                continue
            until = min(end, self._due[0][0]) if self._due else end
            answer = self._clock.wait(self._inbox, until - now)
            if answer is not None:
                self._think(answer)

    def _ask(self, user: User) -> None:
        prompt, length = user.next_prompt(self._scenario)
        answer = Turn(user, prompt, self._clock.now())
        user.answers.append(answer)
        self._waiting.add(answer)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        answer.ticket = self._engine_thread.submit(prompt, params, lambda event: self._take(answer, event))

    def _take(self, answer: Turn, event: TokenEvent) -> None:
        """The sink: called on the driver's thread. Of the step that was in flight at the end nothing counts."""
        if not self._is_over:
            answer.take(event, self._clock.now())
            if event.finish_reason is not None:
                self._inbox.put(answer)

    def _think(self, answer: Turn) -> None:
        self._waiting.discard(answer)
        user, mean = answer.user, self._scenario.think_s
        if answer.error or answer.ended is None:
            return
        user.text = answer.prompt + answer.tokens
        pause = user.rng.expovariate(1 / mean) if mean > 0 else 0.0
        heapq.heappush(self._due, (answer.ended + pause, user.number))

    def cancel(self) -> None:
        """Stops all that is unfinished."""
        self._end, self._is_over = self._clock.now(), True
        for answer in self._waiting:
            if answer.ticket is not None:
                self._engine_thread.cancel(answer.ticket)

    def result(self, slo: SLO) -> LoadResult:
        """What has come of it, judged."""
        settled, end = self._began + self._scenario.warmup_s, self._end
        answers = [answer for user in self._users for answer in user.answers]
        counted = [answer for answer in answers if answer.asked >= settled]
        errors = [answer.error for answer in answers if answer.error]
        users = [kept for user in self._users if (kept := user.meets(slo, settled, end)) is not None]
        kept_answers = [kept for answer in counted if (kept := answer.meets(slo, end)) is not None]
        return LoadResult(
            users=sum(bool(user.answers) for user in self._users),
            users_judged=len(users),
            users_served=_share(users),
            answers=len(kept_answers),
            answers_served=_share(kept_answers),
            cut_off=sum(answer.ended is None for answer in answers),
            errors=len(errors),
            first_error=errors[0] if errors else "",
            ttft_s=percentiles([answer.waited_s(end) for answer in counted if _has_ttft(answer, slo, end)]),
            tpot_s=percentiles([answer.tpot_s for answer in counted if answer.tpot_s is not None]),
            prompt_tokens=sum(len(answer.prompt) for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in answers),
            output_tokens=sum(len(answer.tokens) for answer in answers),
            elapsed_s=end - self._began,
            worst_lag_s=self._worst_lag,
        )


def _has_ttft(answer: Turn, slo: SLO, end: float) -> bool:
    """Whether its first token came; or it is late, and what it has waited is the least that it would have been."""
    return answer.first is not None or (not answer.error and answer.meets(slo, end) is False)


def _share(kept: list[bool]) -> float | None:
    return sum(kept) / len(kept) if kept else None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most users that were seen to hold the level, and all that was tried, by number of users.

    is_limit: whether so many were the most that were to be tried
    """

    users: int
    points: dict[int, LoadResult]
    is_limit: bool = False


def find_capacity(
    measure: Callable[[int], LoadResult], *, share: float = 0.99, most: int = 4096, precision: float = 0.05
) -> Capacity:
    """The most users of whom at least a share is served within the level: doubled until not, then bisected.

    measure:   runs with so many users; a run without anything to judge does not hold the level
    precision: how close to bisect, as a part of the number of users; to one user at the closest
    Raises ConfigError where nothing can be judged with one user.
    """
    points: dict[int, LoadResult] = {}

    def holds(users: int) -> bool:
        points[users] = measure(users)
        served = points[users].users_served
        return served is not None and served >= share

    good, bad = 0, 1
    while bad <= most and holds(bad):
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    if 1 in points and points[1].users_judged == 0:
        raise ConfigError("Not one answer ended within a probe with one user; give the probes more time.")
    is_limit = good == most
    while not is_limit and bad - good > max(1, precision * good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return Capacity(good, dict(sorted(points.items())), is_limit)
