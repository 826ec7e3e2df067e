"""What users ask and when, and the service they are to get."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cbatch.cli.bench.workload import LengthDistribution
from cbatch.engine import ConfigError

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

WARMUP_SHARE = 0.25
"""Share of a probe in which its users arrive, and in which answers do not count yet."""


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `2s`, `1.5m` or `1h`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in SECONDS:
        raise ConfigError(f"{text!r} is not a duration; write it as 500ms, 2s or 1m.")
    return float(match[1]) * SECONDS[match[2]]


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
