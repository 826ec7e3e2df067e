"""Many users at once: what they ask and when, how soon and how fast each is answered, and the service they are to get.

Users arrive one after the other, whatever the engine is doing. Each asks, reads the answer as it streams, thinks, and
asks again. One thread does this for all of them, from a heap of what is due; answers arrive on the engine's thread.
"""

from __future__ import annotations

import heapq
import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.cli.bench.workload import LengthDistribution, first_plain_token
from cbatch.cli.common.percentiles import Percentiles
from cbatch.engine.thread import EngineThread

SERVED_SHARE = 0.99
"""Share of the users for whom the objective has to hold."""

WARMUP_SHARE = 0.25
"""Share of a probe in which its users arrive, and in which answers do not count yet."""


@dataclass(frozen=True, slots=True)
class SLO:
    """The service level objective of each answer: seconds to its first token, and tokens a second from then on."""

    ttft_s: float
    tps: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """How many users there are, and what each of them asks and when.

    users, rate:  how many users arrive, and how many a second on average, at random times (a Poisson process)
    duration_s:   when everything ends; unfinished answers are cut off
    think_s:      mean time between the end of an answer and the next question, exponentially distributed
    turns:        questions of one conversation, each asked with everything said before it. A turn that would no longer
                  fit the context starts a new conversation.
    inputs, outputs: tokens of a question and of an answer
    vocabulary, context: of the model; the context is the longest sequence, in tokens, that model and cache hold
    warmup_s:     answers to questions asked earlier than this are not judged
    seed:         of everything random. Use another one for a second run on the same engine, or the prefix cache
                  knows its prompts.
    """

    users: int
    rate: float
    duration_s: float
    think_s: float
    inputs: LengthDistribution
    outputs: LengthDistribution
    vocabulary: int
    context: int
    turns: int = 1
    warmup_s: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError if not even one turn fits the context."""
        longest = self.inputs.high + self.outputs.high
        if longest > self.context:
            raise ConfigError(
                f"Questions of {self.inputs.high} and answers of {self.outputs.high} tokens are {longest} together; "
                f"the model's context and cache hold {self.context}."
            )

    def probe(self, users: int, duration_s: float) -> Scenario:
        """A shorter run with this many users and other prompts, which judges answers once all users have arrived."""
        warmup_s = WARMUP_SHARE * duration_s
        rate = max(self.rate, users / warmup_s)
        seed = self.seed + 1_000_003 * users
        return replace(self, users=users, rate=rate, duration_s=duration_s, warmup_s=warmup_s, seed=seed)

    def in_round(self, number: int) -> Scenario:
        """The same with other prompts, pauses and times of arrival for every round; round 0 is the scenario itself."""
        return replace(self, seed=self.seed + 15_485_863 * number)


@dataclass(eq=False, slots=True)
class Turn:
    """One question of a user and its answer, as far as it has come. Times are those of the run's clock."""

    user: User
    prompt: list[int]
    asked: float
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    error: str = ""
    request: Request | None = None

    def take(self, event: TokenEvent, now: float) -> None:
        """Records an event. Called on the engine's thread, so it must be quick."""
        if event.token_id is not None:
            self.first = now if self.first is None else self.first
            self.last = now
            self.tokens.append(event.token_id)
            self.cached_tokens = event.cached_tokens
        if event.error is not None:
            self.error = str(event.error)
        if event.finish_reason is not None:
            self.ended = now

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None if there is no second one."""
        if self.first is None or self.last is None or len(self.tokens) < 2:
            return None
        return (self.last - self.first) / (len(self.tokens) - 1)

    def waited_s(self, end: float) -> float:
        """Seconds to the first token, or until `end` if none came."""
        return (end if self.first is None else self.first) - self.asked

    def ttft_s(self, slo: SLO, end: float) -> float | None:
        """Seconds to the first token; if it is late and did not come, so far; None if it could still be in time."""
        is_late = not self.error and self.meets(slo, end) is False
        return self.waited_s(end) if self.first is not None or is_late else None

    def meets(self, slo: SLO, end: float) -> bool | None:
        """Whether it met the objective; None if it was cut off at `end` and was on time until then."""
        if self.error or self.waited_s(end) > slo.ttft_s:
            return False
        if self.ended is not None:
            return self.tpot_s is None or self.tpot_s * slo.tps <= 1
        if self.first is None:
            return None
        is_behind = len(self.tokens) - 1 < int((end - self.first) * slo.tps)
        return False if is_behind else None


@dataclass(eq=False, slots=True)
class User:
    """A user with a random generator of their own, so that their questions do not depend on how they are served.

    text:            token ids of the conversation so far
    turns_in_text:   questions in it
    turns:           everything they have asked
    """

    number: int
    rng: random.Random
    text: list[int] = field(default_factory=list)
    turns_in_text: int = 0
    turns: list[Turn] = field(default_factory=list)

    def next_prompt(self, scenario: Scenario) -> tuple[list[int], int]:
        """Token ids of the next question with the conversation before it, and the length of its answer."""
        question = scenario.inputs.sampler(self.rng)()
        answer = scenario.outputs.sampler(self.rng)()
        is_full = len(self.text) + question + answer > scenario.context
        if self.turns_in_text == scenario.turns or is_full:
            self.text, self.turns_in_text = [], 0
        vocabulary = range(first_plain_token(scenario.vocabulary), scenario.vocabulary)
        self.turns_in_text += 1
        self.text = self.text + self.rng.choices(vocabulary, k=question)
        return self.text, answer

    def meets(self, slo: SLO, judged_from: float, end: float) -> bool | None:
        """Whether all answers to questions asked since `judged_from` met the objective; None if none can be judged."""
        found = {turn.meets(slo, end) for turn in self.turns if turn.asked >= judged_from}
        return False if False in found else (True if True in found else None)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer of a load, for a picture.

    user:         number of the user who asked
    asked_s:      seconds from the start of the load to the question
    ttft_s:       seconds to the first token; if it is late and never came, the time until the end; None if it had not
                  come yet
    tokens_per_s: after the first token; None if there was no second one
    """

    user: int
    asked_s: float
    ttft_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How users were served. Times in seconds; shares are None if nothing can be judged.

    users, users_judged:     users who arrived, and those with an answer that counts
    users_served:            share of users all of whose answers met the objective
    answers, answers_served: answers that count, and the share that met the objective. An answer that was cut off at
                             the end counts if it was already late by then.
    cut_off:                 answers that were cut off at the end
    ttft_s:                  seconds to the first token; if it was late and never came, the time until the end
    tpot_s:                  seconds a token after the first, of an answer
    worst_lag_s:             how late a question was asked at most. If it is long, this program was too slow to
                             generate the load, and the load was less than intended.
    users_missing:           users who were to come, and had not arrived at the end
    timed:                   every answer, for a picture
    """

    users: int
    users_judged: int
    users_served: float | None
    answers: int
    answers_served: float | None
    cut_off: int
    errors: int
    first_error: str
    ttft_s: Percentiles
    tpot_s: Percentiles
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    elapsed_s: float
    worst_lag_s: float
    users_missing: int = 0
    timed: Sequence[TimedAnswer] = field(default=(), repr=False, compare=False)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def holds(self) -> bool:
        """Whether so many of the users were served; a run in which nothing can be judged fails."""
        return self.users_served is not None and self.users_served >= SERVED_SHARE

    @property
    def is_judged(self) -> bool:
        """Whether there were users to judge, and times of first and further tokens."""
        return self.users_served is not None and self.ttft_s.p50 is not None and bool(self.tpot_s.p50)

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, timed=()))
        del data["timed"]
        data |= {f"{name}_share": data.pop(name) for name in ("users_served", "answers_served")}
        return data | {"output_tokens_per_s": self.output_tokens_per_s}


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
            users_served=sum(users) / len(users) if users else None,
            answers=len(answers),
            answers_served=sum(answers) / len(answers) if answers else None,
            cut_off=sum(turn.ended is None for turn in turns),
            errors=len(errors),
            first_error=errors[0] if errors else "",
            ttft_s=Percentiles.of([wait for turn in counted if (wait := turn.ttft_s(slo, end)) is not None]),
            tpot_s=Percentiles.of([turn.tpot_s for turn in counted if turn.tpot_s is not None]),
            prompt_tokens=sum(len(turn.prompt) for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
            output_tokens=sum(len(turn.tokens) for turn in turns),
            elapsed_s=end - self._began,
            worst_lag_s=self._worst_lag,
            users_missing=sum(not user.turns for user in self._users),
            timed=[
                TimedAnswer(
                    user=turn.user.number,
                    asked_s=turn.asked - self._began,
                    ttft_s=turn.ttft_s(slo, end),
                    tokens_per_s=1 / turn.tpot_s if turn.tpot_s else None,
                )
                for turn in turns
            ],
        )
