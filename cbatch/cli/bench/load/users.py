"""Users who ask, and what they are to get: the level of service, what they ask and when, and how they were answered."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cbatch.cli.bench.workload import LengthDistribution
from cbatch.engine import ConfigError

if TYPE_CHECKING:
    from cbatch.engine import RequestHandle, TokenEvent

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

WARMUP_SHARE = 0.25
"""Of a probe's time, the part in which its users arrive, and in which answers do not count yet."""


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `2s`, `1.5m` or `1h`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in SECONDS:
        raise ConfigError(f"{text!r} is no length of time; write it as 500ms, 2s or 1m.")
    return float(match[1]) * SECONDS[match[2]]


@dataclass(frozen=True, slots=True)
class SLO:
    """What each answer is to keep: seconds to its first token, and tokens a second from then on."""

    ttft_s: float
    tps: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who asks what, and when.

    users, rate:  so many arrive, on average so many a second, at random times (a Poisson process)
    duration_s:   when all of it ends, whoever is still waiting
    think_s:      mean time between the end of an answer and the next question, exponentially distributed
    turns:        questions of one conversation: each is asked with all that was said before. A conversation that would
                  not fit the context any more is left for a new one.
    inputs, outputs: tokens of a question and of an answer
    vocabulary, context: of the model; the context is the longest sequence, in tokens, that it and the cache hold
    settle_s:     answers to questions asked earlier than this are not judged
    seed:         of all that is drawn. A second run on the same engine needs another one, else the prefix cache
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
        """Raises ConfigError where not even one turn would fit the context."""
        longest = self.inputs.high + self.outputs.high
        if longest > self.context:
            raise ConfigError(
                f"Questions of {self.inputs.high} and answers of {self.outputs.high} tokens are {longest} together; "
                f"the model's context and cache hold {self.context}."
            )

    def probe(self, users: int, duration_s: float) -> Scenario:
        """A shorter run with so many users, other prompts, and answers judged once the users may be there."""
        warmup_s = WARMUP_SHARE * duration_s
        rate = max(self.rate, users / warmup_s)
        seed = self.seed + 1_000_003 * users
        return replace(self, users=users, rate=rate, duration_s=duration_s, warmup_s=warmup_s, seed=seed)


@dataclass(eq=False, slots=True)
class Turn:
    """One question of a user and what came of it; times of the clock, tokens as they come."""

    user: User
    prompt: list[int]
    asked: float
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    error: str = ""
    ticket: RequestHandle | None = None

    def take(self, event: TokenEvent, now: float) -> None:
        """Writes an event down; called on the driver's thread, so it must be quick."""
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
        """Seconds a token after the first; None where there is no second one."""
        if self.first is None or self.last is None or len(self.tokens) < 2:
            return None
        return (self.last - self.first) / (len(self.tokens) - 1)

    def waited_s(self, end: float) -> float:
        """Seconds to the first token, or until `end` where none came."""
        return (end if self.first is None else self.first) - self.asked

    def meets(self, slo: SLO, end: float) -> bool | None:
        """Whether it kept the level; None where it was cut off at `end` and had kept it so far."""
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
    """Somebody who asks: chance of his own, so that what he asks does not depend on how he is served."""

    number: int
    rng: random.Random
    text: list[int] = field(default_factory=list)
    turn: int = 0
    answers: list[Turn] = field(default_factory=list)

    def next_prompt(self, scenario: Scenario) -> tuple[list[int], int]:
        """The tokens of the next question with what was said before it, and how long the answer is to be."""
        question = scenario.inputs.sampler(self.rng)()
        answer = scenario.outputs.sampler(self.rng)()
        is_full = len(self.text) + question + answer > scenario.context
        if self.turn == scenario.turns or is_full:
            self.text, self.turn = [], 0
        first = min(10, scenario.vocabulary // 2)  # the first ids are special tokens in most vocabularies
        self.turn += 1
        self.text = self.text + self.rng.choices(range(first, scenario.vocabulary), k=question)
        return self.text, answer

    def meets(self, slo: SLO, settled: float, end: float) -> bool | None:
        """Whether all of his answers did; None where none can be judged."""
        found = {answer.meets(slo, end) for answer in self.answers if answer.asked >= settled}
        return False if False in found else (True if True in found else None)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """How a server does with so many users at once. Times in seconds, speeds in output tokens per second and user.

    tps_p10: nine in ten users have at least this speed
    within:  share of users all of whose answers met the objective
    """

    users: int
    ttft_p50: float
    ttft_p99: float
    tps_p50: float
    tps_p10: float
    within: float
