"""Users: what they ask and when, how each of their questions was answered, and the service they are to get."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import Request
from cbatch.cli.bench.workload import LengthDistribution, first_plain_token

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
