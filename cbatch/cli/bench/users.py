"""Many users at once: what they ask and when, how soon and how fast each is answered, and the service they are to get.

Users arrive one after the other, whatever the engine is doing. Each asks, reads the answer as it streams, thinks, and
asks again. One thread does this for all of them, from a heap of what is due; answers arrive on the engine's thread.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.cli.bench.workload import LengthDistribution, plain_tokens
from cbatch.cli.common.percentiles import percentiles
from cbatch.engine.thread import EngineThread

SERVED_SHARE, WARMUP_SHARE = 0.99, 0.25
"""Of the users those for whom the objective has to hold; of a probe in which users arrive and answers do not count."""

Figures = dict[str, Any]
"""How users were served, named as in `--json`: times in seconds; shares are None if nothing can be judged."""


class SLO(NamedTuple):
    """The service level objective of each answer: seconds to its first token, and tokens a second from then on."""

    ttft_s: float
    tps: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """How many users there are, and what each of them asks and when. All times but the end are random.

    rate:       users who arrive in a second on average (a Poisson process)
    duration_s: when everything ends; unfinished answers are cut off
    think_s:    mean time between the end of an answer and the next question, exponentially distributed
    inputs, outputs: tokens of a question and of an answer
    context:    the longest sequence, in tokens, that model and cache hold
    turns:      questions of one conversation, each asked with everything said before it; a turn that would no longer
                fit the context starts a new one
    warmup_s:   answers to questions asked earlier than this are not judged
    seed:       another one is needed for a second run on the same engine, or the prefix cache knows its prompts
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

    def probe(self, users: int, duration_s: float) -> Scenario:
        """A shorter run with this many users and other prompts, which judges answers once all users have arrived."""
        warmup_s, seed = WARMUP_SHARE * duration_s, self.seed + 1_000_003 * users
        rate = max(self.rate, users / warmup_s)
        return replace(self, users=users, rate=rate, duration_s=duration_s, warmup_s=warmup_s, seed=seed)

    def in_round(self, number: int) -> Scenario:
        """The same with other prompts, pauses and times of arrival for every round; round 0 is the scenario itself."""
        return replace(self, seed=self.seed + 15_485_863 * number)


@dataclass(eq=False, slots=True)
class Turn:
    """One question of a user and its answer, as far as it has come. Times are those of the run's clock."""

    user: User
    request: Request
    asked: float
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    error: str = ""

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

    def ttft_s(self, slo: SLO, end: float) -> float | None:
        """Seconds to the first token; if it is late and did not come, so far; None if it could still be in time."""
        if self.first is not None:
            return self.first - self.asked
        return end - self.asked if not self.error and end - self.asked > slo.ttft_s else None

    def meets(self, slo: SLO, end: float) -> bool | None:
        """Whether it met the objective; None if it was cut off at `end` and was on time until then."""
        first = end if self.first is None else self.first
        if self.error or first - self.asked > slo.ttft_s:
            return False
        if self.ended is not None:
            return self.tpot_s is None or self.tpot_s * slo.tps <= 1
        is_behind = self.first is not None and len(self.tokens) - 1 < int((end - self.first) * slo.tps)
        return False if is_behind else None


@dataclass(eq=False, slots=True)
class User:
    """A user with a random generator of their own, so that their questions do not depend on how they are served.

    text: token ids of the conversation so far, which has `turns_in_text` questions
    """

    number: int
    rng: random.Random
    text: list[int] = field(default_factory=list)
    turns_in_text: int = 0

    def next_request(self, scenario: Scenario) -> Request:
        """The next question with the conversation before it."""
        question = scenario.inputs.sampler(self.rng)()
        answer = scenario.outputs.sampler(self.rng)()
        is_full = len(self.text) + question + answer > scenario.context
        if self.turns_in_text == scenario.turns or is_full:
            self.text, self.turns_in_text = [], 0
        self.turns_in_text += 1
        self.text = self.text + self.rng.choices(plain_tokens(scenario.vocabulary), k=question)
        return Request(prompt_ids=self.text, params=SamplingParams(max_tokens=answer, ignore_eos=True))


def holds(figures: Figures) -> bool:
    """Whether so many of the users were served; a run in which nothing can be judged fails."""
    return (figures["users_served_share"] or 0.0) >= SERVED_SHARE


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
) -> Figures:
    """Lets users ask an engine until the time is over, and then cancels what is unfinished. An error ends its user.

    An answer that was cut off at the end counts if it was already late by then.

    make_rng: makes a random generator from a seed
    Raises ConfigError if not even one question and its answer fit the context.
    """
    longest = scenario.inputs.high + scenario.outputs.high
    if longest > scenario.context:
        raise ConfigError(
            f"Questions of {scenario.inputs.high} and answers of {scenario.outputs.high} tokens are {longest} "
            f"together; the model's context and cache hold {scenario.context}."
        )
    clock = clock or Clock()
    inbox: queue.SimpleQueue[Turn] = queue.SimpleQueue()
    is_over = threading.Event()

    def take(turn: Turn, event: TokenEvent) -> None:
        """Called on the engine's thread. Ignores the step that was in flight at the end."""
        if not is_over.is_set():
            turn.take(event, clock.now())
            if event.finish_reason is not None:
                inbox.put(turn)

    began = when = clock.now()
    over = began + scenario.duration_s
    arrivals = make_rng(f"{scenario.seed}/arrivals")
    users = [User(number, make_rng(f"{scenario.seed}/{number}")) for number in range(scenario.users)]
    due = [(when := when + arrivals.expovariate(scenario.rate), user.number) for user in users]
    turns: list[Turn] = []
    num_waiting, worst_lag = 0, 0.0
    try:
        while (now := clock.now()) < over and (due or num_waiting):
            if due and due[0][0] <= now:
                when, number = heapq.heappop(due)
                worst_lag = max(worst_lag, now - when)
                turns.append(turn := Turn(users[number], users[number].next_request(scenario), clock.now()))
                num_waiting += 1
                engine_thread.submit(turn.request, partial(take, turn))
                continue
            until = min(over, due[0][0]) if due else over
            if (ended := clock.wait(inbox, until - now)) is not None:
                num_waiting -= 1
                if not ended.error and ended.ended is not None:
                    user, mean = ended.user, scenario.think_s
                    user.text = [*user.text, *ended.tokens]
                    pause = user.rng.expovariate(1 / mean) if mean > 0 else 0.0
                    heapq.heappush(due, (ended.ended + pause, user.number))
    finally:
        end = clock.now()
        is_over.set()
        for turn in turns:
            if turn.ended is None:
                engine_thread.cancel(turn.request)
    return _figures(scenario, slo, turns, began, end, worst_lag)


def _figures(
    scenario: Scenario, slo: SLO, turns: Sequence[Turn], began: float, end: float, worst_lag: float
) -> Figures:
    counted = [turn for turn in turns if turn.asked >= began + scenario.warmup_s]
    waits = [wait for turn in counted if (wait := turn.ttft_s(slo, end)) is not None]
    errors = [turn.error for turn in turns if turn.error]
    of_users: dict[int, list[bool]] = defaultdict(list)
    for turn in counted:
        if (is_met := turn.meets(slo, end)) is not None:
            of_users[turn.user.number].append(is_met)
    answers = [is_met for same in of_users.values() for is_met in same]
    users, output_tokens = {turn.user.number for turn in turns}, sum(len(turn.tokens) for turn in turns)
    return {
        "users": len(users),
        "users_judged": len(of_users),
        "answers": len(answers),
        "cut_off": sum(turn.ended is None for turn in turns),
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
        "ttft_s": percentiles(waits),
        "tpot_s": percentiles([turn.tpot_s for turn in counted if turn.tpot_s is not None]),
        "prompt_tokens": sum(len(turn.request.prompt_ids) for turn in turns),
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
        "output_tokens": output_tokens,
        "elapsed_s": end - began,
        "worst_lag_s": worst_lag,  # if it is long, this program was too slow to generate the load
        "users_missing": scenario.users - len(users),
        "users_served_share": sum(map(all, of_users.values())) / len(of_users) if of_users else None,
        "answers_served_share": sum(answers) / len(answers) if answers else None,
        "output_tokens_per_s": output_tokens / (end - began) if end > began else 0.0,
    }
