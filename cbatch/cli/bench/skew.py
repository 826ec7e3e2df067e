"""The gain of continuous over static batches as lengths become more and more unequal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from cbatch.cli.bench.compare import cache_of, make_workload
from cbatch.cli.bench.gain import Gain
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.results import Machine, describe_model
from cbatch.cli.bench.strategies import STRATEGIES, Experiment
from cbatch.cli.common.loading import open_engine


@dataclass(frozen=True, slots=True)
class SkewRound:
    """One run of static batches and one of continuous batching on the same work, in seconds, and what that gained."""

    static_s: float
    continuous_s: float
    gain: Gain


@dataclass(frozen=True, slots=True)
class SkewPoint:
    """A skew of lengths, what its work is, and what was measured in each round.

    longest_output: tokens of the longest output; the mean is the same for all skews
    """

    skew: float
    longest_output: int
    rounds: list[SkewRound]

    @property
    def median(self) -> SkewRound:
        """The round with the median gain; of two in the middle, the one that gained less."""
        return sorted(self.rounds, key=lambda one: one.gain.measured)[(len(self.rounds) - 1) // 2]

    def to_json(self) -> dict[str, Any]:
        return {
            "skew": self.skew,
            "longest_output_tokens": self.longest_output,
            **asdict(self.median),
            "gain_of_rounds": [one.gain.measured for one in self.rounds],
        }


@dataclass(frozen=True, slots=True)
class RealWork:
    """Where lengths of real outputs lie on the curve: from the skew `low` to `high`, and which data that is of.

    The skew of such lengths is that of log-normal ones from which 8 slots that do not wait would gain as much.
    """

    name: str
    low: float
    high: float
    source: str

    @property
    def skews(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


REAL_WORK = (
    RealWork(
        "instructions",
        0.47,
        0.67,
        "the 805 of AlpacaEval, answered by GPT-4 1106, Llama 3 8B, GPT-4o and Mistral 7B v0.2; "
        "github.com/tatsu-lab/alpaca_eval",
    ),
    RealWork("chat", 0.63, 0.63, "Azure LLM inference trace 2023, conv; github.com/Azure/AzurePublicDataset"),
    RealWork("code completion", 1.26, 1.26, "the same, code"),
)
"""Computed from the published data by `python -m scripts.benchmarks lengths` on 25 November 2026."""


@dataclass(frozen=True, slots=True)
class SkewReport:
    """The curve: a point for each skew, from equal lengths on."""

    options: BenchOptions
    machine: Machine
    model: str
    points: list[SkewPoint]

    def to_json(self) -> dict[str, Any]:
        options = self.options
        inputs, outputs = options.mean_lengths
        return {
            "machine": asdict(self.machine),
            "model": self.model,
            "work": {
                "requests": options.requests,
                "mean_input_tokens": inputs,
                "mean_output_tokens": outputs,
                "slots": options.batch_size,
                "rounds": options.rounds,
                "seed": options.seed,
            },
            "points": [point.to_json() for point in self.points],
            "real_work": [asdict(work) for work in REAL_WORK],
        }


def measure_skew(options: BenchOptions, on_progress: Callable[[str], None]) -> SkewReport:
    """Runs static and continuous batching by turns, at every skew in every round. Raises ConfigError."""
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        machine, model, config = Machine.of(engine), describe_model(engine), cache_of(engine)
        works = {skew: make_workload(options, engine, skew) for skew in options.skew}
        experiments = {
            skew: Experiment(engine.loaded, config, work, options.batch_size) for skew, work in works.items()
        }
    for experiment in experiments.values():
        replace(experiment, work=experiment.work.warmup).measure(STRATEGIES["static"])
    found: dict[float, list[SkewRound]] = {skew: [] for skew in experiments}
    for number in range(options.rounds):
        for skew, experiment in experiments.items():
            on_progress(f"round {number + 1} of {options.rounds}: skew {skew:g}")
            order = ("static", "continuous") if number % 2 == 0 else ("continuous", "static")
            records = {name: experiment.measure(STRATEGIES[name]) for name in order}
            static, continuous = records["static"], records["continuous"]
            gain = Gain.of(static, continuous, experiment.work)
            found[skew].append(SkewRound(static.elapsed_s, continuous.elapsed_s, gain))
    points = [SkewPoint(skew, max(works[skew].output_lengths), rounds) for skew, rounds in found.items()]
    return SkewReport(options, machine, model, points)
