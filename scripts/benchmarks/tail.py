"""How many slots are idle at the end of a run: rows in the order of the input, and those with the most work first.

    python -m scripts.benchmarks tail --rows 1000 --runs 2

The model costs nothing, so what is counted are steps: of the last tenth of them, the share of slots that nobody uses.
Lengths of outputs are skewed, evenly on a logarithmic scale or lognormal. They are known by the limit of each row, by
the limit of the row's kind (three tasks in one file), or not at all.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import fmean
from typing import Any, NamedTuple

from cbatch import Engine, EngineConfig
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.lines import Line, RowOptions
from cbatch.engine.stats import StepRecord
from scripts.benchmarks.harness import Report, at_least_one
from scripts.benchmarks.models import FreeModel

VOCABULARY, END, CONTEXT, LONGEST = 64, 1, 1024, 512

STEP_SECONDS = 0.001
"""A step of a real model takes longer than reading the rows that begin in it."""

KINDS = ((16, 0.6), (128, 0.3), (LONGEST, 0.1))
"""Limits of three tasks, and their shares of the rows."""


class Run(NamedTuple):
    """Steps of a run, and the shares of slots that were idle in all of them and in the last tenth."""

    steps: int
    idle: float
    idle_at_end: float


def row_of(number: int, length: int, limit: int) -> Line:
    """A row whose output has this length, which only `limit` tells."""
    row: dict[str, Any] = {"prompt_token_ids": [5, 6, 7, 8 + number % 50], "max_tokens": limit}
    row |= {"ignore_eos": True} if length == limit else {"min_tokens": length - 1}
    return Line(number, json.dumps(row).encode())


def lognormal(source: random.Random) -> int:
    return min(max(round(source.lognormvariate(3.5, 1.0)), 1), LONGEST)


def loguniform_limits(source: random.Random) -> tuple[int, int]:
    length = round(math.exp(source.uniform(math.log(8), math.log(LONGEST))))
    return length, length


def lognormal_limits(source: random.Random) -> tuple[int, int]:
    length = lognormal(source)
    return length, length


def by_kinds(source: random.Random) -> tuple[int, int]:
    (limit,) = source.choices([limit for limit, _ in KINDS], [share for _, share in KINDS])
    return source.randint(limit // 4, limit - 1), limit


def untold(source: random.Random) -> tuple[int, int]:
    return min(lognormal(source), LONGEST - 1), LONGEST


WORKLOADS: dict[str, Callable[[random.Random], tuple[int, int]]] = {
    "loguniform, limits of rows": loguniform_limits,
    "lognormal, limits of rows": lognormal_limits,
    "three kinds, limits of kinds": by_kinds,
    "lognormal, one limit": untold,
}
"""Each draws the length of an output, and its limit."""


def measure(lines: list[Line], slots: int, window: int | None, *, reorders: bool) -> Run:
    """Runs the rows, released as a file that is written releases them."""
    busy: list[int] = []

    def on_step(step: StepRecord) -> None:
        busy.append(len(step.scheduled.chunks))
        time.sleep(STEP_SECONDS)

    config = EngineConfig(device="cpu", max_seqs=slots, kv_blocks=slots * CONTEXT // 16, prefix_cache=False)
    with Engine(config, loaded=FreeModel(VOCABULARY, CONTEXT, likeliest=END).loaded(frozenset([END]))) as engine:
        engine.on_step = on_step
        driver = EngineDriver(engine.thread)
        rows = driver.open(RowOptions(reorders=reorders), window=window)
        done = 0
        with closing(rows.finished(iter(lines))) as finished:
            for some in finished:
                done += len(some)
                assert all(row.outcome.error_code is None for row in some), some
                rows.window.release([row.position for row in some])
    assert done == len(lines), "rows were lost"
    last = busy[-max(len(busy) // 10, 1) :]
    return Run(len(busy), 1 - fmean(busy) / slots, 1 - fmean(last) / slots)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=at_least_one, default=1000, help="(%(default)s)")
    add("--slots", type=at_least_one, default=32, help="sequences that run at once (%(default)s)")
    add("--window", type=at_least_one, help="rows read but not yet written (four times the slots)")
    add("--runs", type=at_least_one, default=2, help="with other lengths each; figures are means (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    table = [["lengths", "idle at the end", "most work first", "steps", "most work first"]]
    for name, draw in WORKLOADS.items():
        found = {reorders: list(runs(draw, options, reorders=reorders)) for reorders in (False, True)}
        ends = {way: fmean(one.idle_at_end for one in each) for way, each in found.items()}
        steps = {way: fmean(one.steps for one in each) for way, each in found.items()}
        report.figures[name] = {"in_order": found[False], "most_work_first": found[True]}
        table.append([name, f"{ends[False]:.1%}", f"{ends[True]:.1%}", f"{steps[False]:,.0f}", f"{steps[True]:,.0f}"])
    report.table(table)
    return 0


def runs(
    draw: Callable[[random.Random], tuple[int, int]], options: argparse.Namespace, *, reorders: bool
) -> Iterator[Run]:
    for seed in range(options.runs):
        source = random.Random(seed)
        lines = [row_of(number, *draw(source)) for number in range(options.rows)]
        yield measure(lines, options.slots, options.window, reorders=reorders)
