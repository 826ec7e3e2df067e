"""What a load test reports, and the object that `--json` prints for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cbatch.cli.bench.load.users import SLO, Scenario
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.results import Machine
from cbatch.cli.common.percentiles import Percentiles


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
    timed: Sequence[TimedAnswer] = field(default=(), repr=False, compare=False)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def is_judged(self) -> bool:
        """Whether there were users to judge, and times of first and further tokens."""
        return self.users_served is not None and self.ttft_s.p50 is not None and bool(self.tpot_s.p50)

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, timed=()))
        del data["timed"]
        for name in ("users_served", "answers_served"):
            data[f"{name}_share"] = data.pop(name)
        return data | {"output_tokens_per_s": self.output_tokens_per_s}


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most users for whom the objective was seen to hold, and all probes by number of users.

    is_limit: whether this was the most users to be tried
    """

    users: int
    probes: dict[int, LoadResult]
    is_limit: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "capacity_users": self.users,
            "capacity_is_limit": self.is_limit,
            "points": [result.to_json() | {"users": users} for users, result in self.probes.items()],
        }


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load, or the search for the most users.

    rounds: the results of every round, by number of users, if there were several
    """

    options: BenchOptions
    machine: Machine
    model: str
    scenario: Scenario
    slo: SLO
    found: LoadResult | Capacity
    rounds: dict[int, list[LoadResult]] = field(default_factory=dict)

    @property
    def runs(self) -> dict[int, LoadResult]:
        """The results by number of users."""
        return self.found.probes if isinstance(self.found, Capacity) else {self.found.users: self.found}

    def to_json(self) -> dict[str, Any]:
        found, scenario = self.found.to_json(), self.scenario
        return {
            "machine": asdict(self.machine),
            "model": self.model,
            **(found if isinstance(self.found, Capacity) else {"load": found}),
            "work": {
                "rate": scenario.rate,
                "duration_s": scenario.duration_s,
                "think_s": scenario.think_s,
                "turns": scenario.turns,
                "input_len": self.options.input_len,
                "output_len": self.options.output_len,
                "slo_ttft_s": self.slo.ttft_s,
                "slo_tps": self.slo.tps,
            },
        }
