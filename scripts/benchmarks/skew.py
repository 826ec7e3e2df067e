"""The gain of continuous over static batches as the lengths of prompts and outputs become more unequal.

    python -m scripts.benchmarks skew --skews 0 0.25 0.5 0.75 1 1.25 1.5

The gain is the product of the four factors after it; those below 1 eat some of it. The last two columns are the gain by
arithmetic, if all steps take as long, and if all tokens do.
"""

from __future__ import annotations

import argparse
from typing import Any

from cbatch import Engine, EngineConfig
from cbatch.cli.bench.gain import gain_of
from cbatch.cli.bench.strategies import STRATEGIES, Experiment, turns
from cbatch.cli.bench.workload import LengthDistribution, Workload, synthetic_workload
from scripts.benchmarks.expected_gain import expected_gain
from scripts.benchmarks.harness import Report, at_least_one


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Runs static and continuous batching by turns, at every skew in every round. Returns the points of the curve."""
    with Engine(EngineConfig(model=options.model)) as engine:
        experiments = {
            f"skew {skew:g}": Experiment.of(engine, skewed_work(options, engine, skew), options.batch_size)
            for skew in options.skews
        }
    for experiment in experiments.values():
        experiment.warm_up(STRATEGIES["static"])
    rounds: dict[str, list[dict[str, Any]]] = {skew: [] for skew in experiments}
    for number, skew in turns(experiments, options.rounds, report.note):
        order = ("static", "continuous") if number % 2 == 0 else ("continuous", "static")
        runs = {name: experiments[skew].measure(STRATEGIES[name]) for name in order}
        times = {f"{name}_s": runs[name].elapsed_s for name in ("static", "continuous")}
        rounds[skew].append(times | {"gain": gain_of(runs["static"], runs["continuous"], experiments[skew].work)})
    works = [experiment.work for experiment in experiments.values()]
    points = map(point_of, options.skews, works, rounds.values())
    return [
        point | {"expected": expected_gain(work, options.batch_size)} for point, work in zip(points, works, strict=True)
    ]


def skewed_work(options: argparse.Namespace, engine: Engine, skew: float) -> Workload:
    inputs, outputs = (LengthDistribution(mean, mean, skew=skew) for mean in (options.input_len, options.output_len))
    vocabulary, longest = engine.model.vocab_size, engine.limits.sequence.longest
    return synthetic_workload(options.requests, inputs, outputs, vocabulary, longest, options.seed)


def point_of(skew: float, work: Workload, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A point of the curve: the round with the median gain; of two in the middle, the one that gained less."""
    gains = [one["gain"]["measured"] for one in rounds]
    median = sorted(rounds, key=lambda one: one["gain"]["measured"])[(len(rounds) - 1) // 2]
    return {"skew": skew, "longest_output_tokens": max(work.output_lengths), **median, "gain_of_rounds": gains}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--skews", nargs="+", type=float, default=[0, 0.5, 1, 1.5], help="as --skew of cbatch bench (0 0.5 1 1.5)")
    add("--model", help="folder or name (the demo model)")
    add("--requests", type=at_least_one, default=192, help="(%(default)s)")
    add("--input-len", type=at_least_one, default=24, help="mean tokens of a prompt (%(default)s)")
    add("--output-len", type=at_least_one, default=32, help="mean tokens of an output (%(default)s)")
    add("--batch-size", type=at_least_one, default=8, help="slots of both strategies (%(default)s)")
    add("--rounds", type=at_least_one, default=3, help="the one with the median gain counts (%(default)s)")
    add("--seed", type=int, default=7, help="(%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    points = measure(options, report)
    factors = ("slots", "padding", "tail", "step_time")
    head = ["skew", "longest output", "static", "continuous", "gain", "min – max"]
    lines = [
        [
            f"{point['skew']:g}",
            f"{point['longest_output_tokens']:,}",
            f"{point['static_s']:.2f} s",
            f"{point['continuous_s']:.2f} s",
            f"{point['gain']['measured']:.2f}",
            f"{min(point['gain_of_rounds']):.2f} – {max(point['gain_of_rounds']):.2f}",
            *(f"{point['gain'][name]:.2f}" for name in factors),
            *(f"{value:.2f}" for value in point["expected"].values()),
        ]
        for point in points
    ]
    report.table([[*head, *factors, "by steps", "by tokens"], *lines])
    report.figures["points"] = points
    return 0
