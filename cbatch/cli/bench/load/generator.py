"""Many users at once: how soon and how fast each of them is answered.

Users arrive one after the other, whatever the engine is doing. Each asks, reads the answer as it streams, thinks, and
asks again. One thread does this for all of them, from a heap of what is due; answers arrive on the engine's thread.
"""

from __future__ import annotations

import heapq
import queue
import random
import time
from collections.abc import Callable

from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.cli.bench.load.results import LoadResult, TimedAnswer
from cbatch.cli.bench.load.users import SLO, Scenario, Turn, User
from cbatch.cli.common.percentiles import Percentiles
from cbatch.engine.thread import EngineThread


class Clock:
    """The time, and waiting in it."""

    def now(self) -> float:
        """Seconds since some moment. Called on any thread."""
        return time.perf_counter()

    def wait(self, inbox: queue.SimpleQueue[Turn], timeout: float) -> Turn | None:
        """The next turn that ends, or None after `timeout` seconds."""
        try:
            return inbox.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None


def run_load(
    engine_thread: EngineThread,
    scenario: Scenario,
    slo: SLO,
    clock: Clock | None = None,
    make_rng: Callable[[str], random.Random] = random.Random,
) -> LoadResult:
    """Lets users ask an engine until the time is over, and then cancels what is unfinished. An error ends its user.

    make_rng: makes a random generator from a seed
    Raises ConfigError if a question would not fit the context.
    """
    scenario.check()
    generator = _LoadGenerator(engine_thread, scenario, clock or Clock(), make_rng)
    try:
        generator.run()
    finally:
        generator.cancel()
    return generator.result(slo)


class _LoadGenerator:
    """One run: which user asks next and when, and which turns wait for their answer."""

    def __init__(
        self, engine_thread: EngineThread, scenario: Scenario, clock: Clock, make_rng: Callable[[str], random.Random]
    ) -> None:
        self._engine_thread, self._scenario, self._clock = engine_thread, scenario, clock
        self._inbox: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._waiting: set[Turn] = set()
        self._users: list[User] = []
        self._worst_lag = 0.0
        self._is_over = False
        self._began = self._end = clock.now()
        self._due: list[tuple[float, int]] = []
        arrivals, when = make_rng(f"{scenario.seed}/arrivals"), self._began
        for number in range(scenario.users):
            when += arrivals.expovariate(scenario.rate)
            self._due.append((when, number))
            self._users.append(User(number, make_rng(f"{scenario.seed}/{number}")))

    def run(self) -> None:
        """Asks what is due and takes finished answers, until the time is over or no user is left."""
        end = self._began + self._scenario.duration_s
        while (now := self._clock.now()) < end and (self._due or self._waiting):
            if self._due and self._due[0][0] <= now:
                due, number = heapq.heappop(self._due)
                self._worst_lag = max(self._worst_lag, now - due)
                self._ask(self._users[number])
                continue
            until = min(end, self._due[0][0]) if self._due else end
            turn = self._clock.wait(self._inbox, until - now)
            if turn is not None:
                self._schedule_next(turn)

    def _ask(self, user: User) -> None:
        prompt, length = user.next_prompt(self._scenario)
        turn = Turn(user, prompt, self._clock.now())
        user.turns.append(turn)
        self._waiting.add(turn)
        turn.request = Request(prompt_ids=prompt, params=SamplingParams(max_tokens=length, ignore_eos=True))
        self._engine_thread.submit(turn.request, lambda event: self._take(turn, event))

    def _take(self, turn: Turn, event: TokenEvent) -> None:
        """The sink, called on the engine's thread. Ignores the step that was in flight at the end."""
        if not self._is_over:
            turn.take(event, self._clock.now())
            if event.finish_reason is not None:
                self._inbox.put(turn)

    def _schedule_next(self, turn: Turn) -> None:
        self._waiting.discard(turn)
        user, mean = turn.user, self._scenario.think_s
        if turn.error or turn.ended is None:
            return
        user.text = turn.prompt + turn.tokens
        pause = user.rng.expovariate(1 / mean) if mean > 0 else 0.0
        heapq.heappush(self._due, (turn.ended + pause, user.number))

    def cancel(self) -> None:
        """Stops everything that is unfinished."""
        self._end, self._is_over = self._clock.now(), True
        for turn in self._waiting:
            if turn.request is not None:
                self._engine_thread.cancel(turn.request)

    def result(self, slo: SLO) -> LoadResult:
        judged_from, end = self._began + self._scenario.warmup_s, self._end
        turns = [turn for user in self._users for turn in user.turns]
        counted = [turn for turn in turns if turn.asked >= judged_from]
        errors = [turn.error for turn in turns if turn.error]
        users = [met for user in self._users if (met := user.meets(slo, judged_from, end)) is not None]
        answers = [met for turn in counted if (met := turn.meets(slo, end)) is not None]
        return LoadResult(
            users=sum(bool(user.turns) for user in self._users),
            users_judged=len(users),
            users_served=_share(users),
            answers=len(answers),
            answers_served=_share(answers),
            cut_off=sum(turn.ended is None for turn in turns),
            errors=len(errors),
            first_error=errors[0] if errors else "",
            ttft_s=Percentiles.of([turn.waited_s(end) for turn in counted if _has_ttft(turn, slo, end)]),
            tpot_s=Percentiles.of([turn.tpot_s for turn in counted if turn.tpot_s is not None]),
            prompt_tokens=sum(len(turn.prompt) for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
            output_tokens=sum(len(turn.tokens) for turn in turns),
            elapsed_s=end - self._began,
            worst_lag_s=self._worst_lag,
            users_missing=sum(not user.turns for user in self._users),
            timed=[_timed(turn, slo, self._began, end) for turn in turns],
        )


def _has_ttft(turn: Turn, slo: SLO, end: float) -> bool:
    """Whether its first token came, or is so late that the wait so far counts as the least it would have been."""
    return turn.first is not None or (not turn.error and turn.meets(slo, end) is False)


def _share(met: list[bool]) -> float | None:
    return sum(met) / len(met) if met else None


def _timed(turn: Turn, slo: SLO, began: float, end: float) -> TimedAnswer:
    waited = turn.waited_s(end) if _has_ttft(turn, slo, end) else None
    speed = 1 / turn.tpot_s if turn.tpot_s else None
    return TimedAnswer(turn.user.number, turn.asked - began, waited, speed)
