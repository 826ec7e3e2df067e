"""Replicas against one engine on the same cores, and how soon the rows of a dead replica run elsewhere.

    python -m scripts.benchmarks replica-engines --model FOLDER --replicas 2

One engine of this process has all cores, and the replicas have equal shares of them. Both run the same rows by turns;
the figure is the median of the ratios of the rounds. Then one replica is killed in the middle of each of some runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from cbatch import Engine, EngineConfig
from cbatch.batch.driver import BatchDriver
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.lines import Line, RowOptions
from cbatch.replicas.connection import ReplicaConnection, ReplicaLauncher
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.local import LocalLauncher, find_places
from scripts.benchmarks.harness import Report, at_least_one, by_turns, median_by_name


@dataclass(frozen=True, slots=True)
class Given:
    """Rows that went to a replica: its number, and the indices of their lines."""

    at: float
    number: int
    rows: frozenset[int]


@dataclass(slots=True)
class WatchedLauncher(ReplicaLauncher):
    """Starts replicas of this machine, and notes which of them gets which rows, and when.

    pids:     the process of each replica
    ready_at: when each has loaded its model
    """

    launcher: LocalLauncher
    num_replicas: int
    given: list[Given] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)

    def start(self, number: int, config: EngineConfig) -> ReplicaConnection:
        return _WatchedConnection(self.launcher.start(number, config), number, self)

    def close(self) -> None:
        self.launcher.close()


@dataclass(slots=True)
class _WatchedConnection:
    connection: ReplicaConnection
    number: int
    launcher: WatchedLauncher

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method == "exchange" and arguments[0]:
            indices = frozenset(line.index for line in arguments[0])
            self.launcher.given.append(Given(time.monotonic(), self.number, indices))
        answer = self.connection.call(method, *arguments, timeout_s=timeout_s)
        if method == "info":
            self.launcher.pids[self.number] = answer.pid
            self.launcher.ready_at[self.number] = time.monotonic()
        return answer

    def kill(self) -> None:
        self.connection.kill()


def make_lines(count: int, max_tokens: int) -> list[Line]:
    """Rows with prompts of 4 to 64 tokens, and answers of a quarter of `max_tokens` up to all of them."""
    lines = []
    for index in range(count):
        prompt = [2 + (index * 31 + place * 7) % 300 for place in range(4 + index * 7 % 61)]
        tokens = max_tokens // 4 + index * 13 % (max_tokens - max_tokens // 4 + 1)
        row = {"prompt_token_ids": prompt, "max_tokens": max(tokens, 1), "ignore_eos": True}
        lines.append(Line(index, json.dumps(row).encode()))
    return lines


def run_rows(driver: BatchDriver, lines: Sequence[Line], on_rows: Callable[[int, float], None] | None = None) -> float:
    """Seconds for a batch. on_rows: called with the index of each row that has finished, and the time"""
    begun = time.perf_counter()
    stream = driver.open(RowOptions())
    indices = set()
    for rows in stream.finished(iter(lines)):
        stream.window.release([row.position for row in rows])
        for row in rows:
            assert row.outcome.error_code is None, row.data
            indices.add(row.index)
            if on_rows is not None:
                on_rows(row.index, time.monotonic())
    assert len(indices) == len(lines), "rows were lost"
    return time.perf_counter() - begun


def kill_one(driver: ReplicaDriver, launcher: WatchedLauncher, lines: Sequence[Line]) -> dict[str, float]:
    """Kills the last replica in the middle of a batch. Times are from then on."""
    number = launcher.num_replicas - 1
    while any(status.state != "running" for status in driver.each()):
        time.sleep(0.01)
    launcher.given.clear()
    finished: dict[int, float] = {}
    killed_at: list[float] = []
    held: set[int] = set()

    def on_row(index: int, now: float) -> None:
        finished[index] = now
        if not killed_at and len(finished) >= len(lines) // 3:
            held.update(*(one.rows for one in launcher.given if one.number == number))
            held.difference_update(finished)
            killed_at.append(time.monotonic())
            os.kill(launcher.pids[number], signal.SIGKILL)

    run_rows(driver, lines, on_row)
    (begun,) = killed_at
    while launcher.ready_at[number] < begun:
        time.sleep(0.01)
    again = [one for one in launcher.given if one.at > begun and one.rows & held]
    return {
        "rows_held": len(held),
        "first_given_s": min(one.at for one in again) - begun,
        "all_finished_s": max(finished[index] for index in held) - begun,
        "loaded_again_s": launcher.ready_at[number] - begun,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="model folder (the bundled demo model)")
    add("--replicas", type=at_least_one, default=2, help="(%(default)s)")
    add("--rows", type=at_least_one, default=600, help="of a run (%(default)s)")
    add("--max-tokens", type=at_least_one, default=96, help="of the longest answers (%(default)s)")
    add("--max-seqs", type=at_least_one, default=64, help="of the one engine; replicas share them (%(default)s)")
    add("--kv-cache-memory", default="256MiB", help="of each engine (%(default)s)")
    add("--device", default="cpu", help="(%(default)s)")
    add("--rounds", type=at_least_one, default=5, help="(%(default)s)")
    add("--deaths", type=int, default=5, help="runs in which a replica is killed (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    lines = make_lines(options.rows, options.max_tokens)
    config = partial(
        EngineConfig,
        model=options.model,
        device=options.device,
        kv_cache_memory=options.kv_cache_memory,
        prefix_cache=False,  # or the second run would find the prompts of the first one
    )
    of_replica = config(max_seqs=max(options.max_seqs // options.replicas, 1))
    launcher = WatchedLauncher(LocalLauncher(find_places(of_replica, options.replicas)), options.replicas)
    with ExitStack() as stack:
        driver = stack.enter_context(ReplicaDriver(launcher, of_replica))
        engine = stack.enter_context(Engine(config(max_seqs=options.max_seqs)))
        drivers: dict[str, BatchDriver] = {"engine": EngineDriver(engine.thread), "replicas": driver}
        ways = {name: partial(run_rows, one, lines) for name, one in drivers.items()}
        by_turns(ways, 1)  # warms up
        seconds = by_turns(ways, options.rounds)
        ratios = [one / many for one, many in zip(seconds["engine"], seconds["replicas"], strict=True)]
        for name, found in seconds.items():
            report.line(f"{name}: {options.rows / median(found):,.1f} rows/s, median of {options.rounds}")
        report.line(f"replicas / engine: {median(ratios):.3f} (rounds: {min(ratios):.3f} to {max(ratios):.3f})")
        logging.getLogger("cbatch").setLevel(logging.ERROR)  # the deaths are meant
        deaths = [kill_one(driver, launcher, lines) for _ in range(options.deaths)]
    if deaths:
        middle = median_by_name(deaths)
        report.line(
            f"killed with {middle['rows_held']:.0f} rows: the first of them run elsewhere after "
            f"{1000 * middle['first_given_s']:,.0f} ms, all are finished after {middle['all_finished_s']:.2f} s; the "
            f"replica has loaded its model again after {middle['loaded_again_s']:.2f} s"
        )
    report.figures |= {"seconds": seconds, "ratios": ratios, "deaths": deaths}
    return 0
