"""The gain of continuous over static batches with as many slots, by its parts, and as lengths become more unequal.

A static batch takes as many steps as its longest output has tokens; continuous batching as many as the slots need if
the first free one takes the next request. If a step costs a fixed time and a time for each token, the gain lies between
the ratio of the steps and that of the tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.page import KeyFigure, Page, Table
from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord
from cbatch.cli.bench.roofline import describe
from cbatch.cli.bench.strategies import STRATEGIES, Experiment, OnProgress, turns
from cbatch.cli.bench.workload import Workload
from cbatch.cli.common.loading import open_engine


def count_static(work: Workload, slots: int) -> tuple[int, int]:
    """The steps and tokens of static batches: prompts padded to the longest, outputs until the last ends."""
    steps = tokens = 0
    for batch in work.batches(slots):
        width = max(len(work.prompts[index]) for index in batch)
        longest = max(work.output_lengths[index] for index in batch)
        steps += longest
        tokens += len(batch) * (width + longest - 1)
    return steps, tokens


def count_continuous(work: Workload, slots: int) -> tuple[int, int]:
    """The steps and tokens if each prompt fits into one step: the next request gets the first free slot."""
    free_at = [0] * slots
    for length in work.output_lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at), work.prompt_tokens + work.output_tokens - len(work.prompts)


def expected_gain(work: Workload, slots: int) -> dict[str, float]:
    """The gain by arithmetic, named as in `--json`: if all steps take as long, and if all tokens do."""
    static, continuous = count_static(work, slots), count_continuous(work, slots)
    return {"by_steps": static[0] / continuous[0], "by_tokens": static[1] / continuous[1]}


def gain_of(static: RunRecord, continuous: RunRecord, work: Workload) -> dict[str, Any]:
    """The measured gain as a product of four factors, named as in `--json`; those below 1 eat some of it.

    They are of slots that never wait, of no padding, of slots that are empty at the end, and of longer steps.
    """
    full_steps = work.output_tokens / continuous.slots
    static_steps, steps = len(static.steps), len(continuous.steps)
    without_padding_s = static.elapsed_s
    for step in static.steps:
        if padding := step.tokens("padding"):  # which takes its share of the step's tokens
            without_padding_s -= (step.end - step.start) * padding / step.tokens(*TOKEN_KINDS)
    return {
        "measured": static.elapsed_s / continuous.elapsed_s,
        "slots": static_steps / full_steps,
        "padding": static.elapsed_s / without_padding_s,
        "tail": full_steps / steps,
        "step_time": (without_padding_s / static_steps) / (continuous.elapsed_s / steps),
        "expected": expected_gain(work, continuous.slots),
    }


def gain_sentence(gain: Mapping[str, Any]) -> str:
    return (
        f"Continuous batching is {gain['measured']:.2f} × as fast as static batches: {gain['slots']:.2f} by slots that "
        f"do not wait, × {gain['padding']:.2f} without padding, × {gain['tail']:.2f} for empty slots at the end, "
        f"× {gain['step_time']:.2f} for the time of a step. By arithmetic: {gain['expected']['by_steps']:.2f} if all "
        f"steps take as long, {gain['expected']['by_tokens']:.2f} if all tokens do."
    )


def measure(options: BenchOptions, on_progress: OnProgress) -> Page:
    """Runs static and continuous batching by turns, at every skew in every round. Raises ConfigError."""
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        about = describe(engine)
        works = [options.make_workload(engine, skew) for skew in options.skew]
        experiments = {
            f"skew {skew:g}": Experiment.of(engine, work, options.batch_size)
            for skew, work in zip(options.skew, works, strict=True)
        }
    for experiment in experiments.values():
        experiment.warm_up(STRATEGIES["static"])
    rounds: dict[str, list[dict[str, Any]]] = {skew: [] for skew in experiments}
    for number, skew in turns(experiments, options.rounds, on_progress):
        order = ("static", "continuous") if number % 2 == 0 else ("continuous", "static")
        runs = {name: experiments[skew].measure(STRATEGIES[name]) for name in order}
        times = {f"{name}_s": runs[name].elapsed_s for name in ("static", "continuous")}
        rounds[skew].append(times | {"gain": gain_of(runs["static"], runs["continuous"], experiments[skew].work)})
    inputs, outputs = options.lengths()
    work = {
        "requests": options.requests,
        "mean_input_tokens": inputs.high,
        "mean_output_tokens": outputs.high,
        "slots": options.batch_size,
        "rounds": options.rounds,
        "seed": options.seed,
    }
    points = list(map(point_of, options.skew, works, rounds.values()))
    return page_of(about | {"work": work, "points": points})


def point_of(skew: float, work: Workload, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A point of the curve: the round with the median gain; of two in the middle, the one that gained less."""
    gains = [one["gain"]["measured"] for one in rounds]
    median = sorted(rounds, key=lambda one: one["gain"]["measured"])[(len(rounds) - 1) // 2]
    return {"skew": skew, "longest_output_tokens": max(work.output_lengths), **median, "gain_of_rounds": gains}


def skew_table(points: list[dict[str, Any]]) -> Table:
    """The gain by arithmetic, as measured, and its factors, a line for each skew."""
    lines = []
    for point in points:
        gain, gains = point["gain"], point["gain_of_rounds"]
        line = {
            "skew": f"{point['skew']:g}",
            "longest output": f"{point['longest_output_tokens']:,}",
            "static": f"{point['static_s']:.2f} s",
            "continuous": f"{point['continuous_s']:.2f} s",
            "gain": f"{gain['measured']:.2f}",
            "min – max": f"{min(gains):.2f} – {max(gains):.2f}",
        }
        factors = {name: gain[name] for name in ("slots", "padding", "tail", "step_time")} | gain["expected"]
        lines.append(line | {name.replace("_", " "): f"{factor:.2f}" for name, factor in factors.items()})
    return Table.of(lines)


def page_of(data: dict[str, Any]) -> Page:
    """data: the object that `--json` prints"""
    work, points = data["work"], data["points"]
    best = max(points, key=lambda point: point["gain"]["measured"])
    gain, skew = best["gain"], f"{best['skew']:g}"
    without = f"{gain['padding']:.2f} × without padding"
    return Page(
        data=data,
        headline=f"Continuous batching: up to {gain['measured']:.1f} × as fast as static batches, at skew {skew}",
        figures=[
            KeyFigure(f"{gain['slots']:.1f} ×", "by slots that do not wait", f"at a skew of {skew}"),
            KeyFigure(f"{gain['tail']:.2f} ×", "for empty slots at the end", "what eats some of it"),
            KeyFigure(f"{gain['step_time']:.2f} ×", "for the time of a step", without),
        ],
        table=skew_table(points),
        facts=(
            f"{work['requests']:,} requests with prompts of {work['mean_input_tokens']} and outputs of "
            f"{work['mean_output_tokens']} tokens in the mean, {work['slots']} slots, median of {work['rounds']}"
        ),
        method="Static and continuous batching were run by turns.",
        remarks=["The gain is the product of the four factors after it; those below 1 eat some of it."],
    )
