"""Users who ask, and how each of their questions was answered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.cli.bench.load.scenario import SLO, Scenario
from cbatch.cli.bench.workload import first_plain_token

if TYPE_CHECKING:
    from cbatch.engine import RequestHandle, TokenEvent


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
    handle: RequestHandle | None = None

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
