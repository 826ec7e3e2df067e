"""Cost of feeding replicas for the process that drives them, and how many of them one process can feed.

    python -m scripts.benchmarks replicas

The replicas are processes without a model, which finish short rows at a fixed rate and take hardly any time for it.
Reader, dispatcher, exchange and output file are real. First one replica at 1,000 rows/s: the share of a core that the
driving process takes. Then 8 replicas at 2,000 rows/s each, and at a rate that no driver can feed: rows per second. At
last the end of a batch with one replica that is ten times slower: seconds for the last 5% of the rows, with and without
copies for idle replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from cbatch.base.config import EngineConfig
from cbatch.batch.lines import Line, RowOptions, read_lines
from cbatch.batch.row import RowOutcome
from cbatch.batch.writer import FileWriter, run_stream
from cbatch.cli.run.stats import RunStats
from cbatch.engine.stats import total_stats
from cbatch.replicas.connection import MAX_REPLY_ROWS, ReplicaInfo, Reply
from cbatch.replicas.dispatcher import Dispatcher
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.local import LocalLauncher, Place
from cbatch.runtime.cpu import tune_process
from cbatch.schedule.limits import EngineLimits
from scripts.benchmarks.harness import Report, at_least_one

if TYPE_CHECKING:
    from cbatch.replicas.connection import FinishedRow

RATE_VARIABLE = "CBATCH_BENCHMARK_ROWS_PER_S"
LIMITS = EngineLimits(
    max_seqs=256, max_batch_tokens=2048, max_model_len=4096, block_size=16, num_blocks=65536, kv_bytes_per_token=1
)
OUTCOME = RowOutcome(None, "", 12, 0, 8, 0.01, 0.002)
ANSWER = "an answer of some words, as a short row has it"
UNBOUNDED = 10**6


class PacedReplica:
    """Answers as a `Replica` does, with rows that it finishes at a fixed rate."""

    def __init__(self, rows_per_s: float) -> None:
        self._rows_per_s = rows_per_s
        self._rows: deque[Line] = deque()
        self._since = 0.0
        self._stats = total_stats(())

    def info(self) -> ReplicaInfo:
        return ReplicaInfo("paced", LIMITS, {}, host="here", pid=os.getpid())

    def keys(self, options: RowOptions, lines: list[Line]) -> list[str]:
        return ["" for _ in lines]

    def begin(self, options: RowOptions) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._rows.clear()

    def exchange(self, rows: list[Line], cancelled: list[int], wait_s: float, linger_s: float) -> Reply:
        if not self._rows:
            self._since = time.monotonic()
        self._rows.extend(rows)
        time.sleep(linger_s if self._rows else wait_s)
        now = time.monotonic()
        count = min(int((now - self._since) * self._rows_per_s), len(self._rows), MAX_REPLY_ROWS)
        self._since = self._since + count / self._rows_per_s if count < len(self._rows) else now
        steps = self._stats.num_steps + 1
        self._stats = replace(self._stats, num_steps=steps, num_tokens=self._stats.num_tokens + 8 * count)
        return Reply([_finish(self._rows.popleft()) for _ in range(count)], self._stats, self._stats.num_tokens)


def open_paced_replica(config: EngineConfig) -> PacedReplica:
    return PacedReplica(float(os.environ[RATE_VARIABLE]))


def _finish(line: Line) -> FinishedRow:
    data = f'{{"index": {line.index}, "id": null, "text": "{ANSWER}", "finish_reason": "stop", "key": "{"0" * 32}"}}\n'
    return line.index, data.encode(), OUTCOME


@contextmanager
def paced_replicas(rates: Sequence[int]) -> Iterator[ReplicaDriver]:
    """One for each rate, in rows per second; all of them are ready."""
    places = [Place("cpu", environment={RATE_VARIABLE: str(rate)}) for rate in rates]
    with ReplicaDriver(LocalLauncher(places, f"{__name__}:open_paced_replica"), EngineConfig()) as driver:
        while any(one.state != "running" for one in driver.each()):
            time.sleep(0.01)
        yield driver


def short_row(number: int) -> bytes:
    return json.dumps({"id": f"row-{number}", "prompt": f"A short question, number {number}"}).encode() + b"\n"


def measure(replicas: int, rows_per_s: int, seconds: float, limit_rows: int = 10**7) -> dict[str, float]:
    """One run: rows per second, and the share of a core that this process took for it."""
    count = min(int(replicas * rows_per_s * seconds), limit_rows)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl")
        with source.open("wb") as file:
            file.writelines(map(short_row, range(count)))
        stats = RunStats()
        with (
            paced_replicas([rows_per_s] * replicas) as driver,
            FileWriter(Path(folder, "out.jsonl"), input_order=True) as output,
            source.open("rb") as stream,
        ):
            output.start()
            rows = driver.open(RowOptions())
            stats.attach(driver, rows)
            tune_process()
            cpu, begun = time.process_time(), time.perf_counter()
            run_stream(rows, output, read_lines(stream), stats.count)
            cpu, elapsed = time.process_time() - cpu, time.perf_counter() - begun
            deaths = sum(one.deaths for one in driver.each())
    assert stats.rows == count and not stats.errors and not deaths, "rows were lost"
    return {
        "replicas": replicas,
        "rows": count,
        "rows_per_s": count / stats.elapsed_s,
        "core_share": cpu / elapsed,
        "us_per_row": 1e6 * cpu / count,
    }


def measure_tail(rates: Sequence[int], seconds: float, *, copies: bool) -> float:
    """Seconds from when 95% of the rows are finished until all are. copies: whether idle replicas take some"""
    count = int(sum(rates) * seconds)
    lines = (Line(number, short_row(number)) for number in range(count))
    times: list[float] = []
    take_none: AbstractContextManager[object] = patch.object(Dispatcher, "_copies", lambda *_: [])
    with paced_replicas(rates) as driver, nullcontext() if copies else take_none:
        stream = driver.open(RowOptions())
        for rows in stream.finished(lines):
            stream.window.release([row.position for row in rows])
            times += [time.perf_counter()] * len(rows)
    assert len(times) == count, "rows were lost or doubled"
    return times[-1] - times[int(0.95 * count)]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=at_least_one, default=8, help="(%(default)s)")
    add("--rows-per-s", type=at_least_one, default=2000, help="of each of them (%(default)s)")
    add("--alone-rows-per-s", type=at_least_one, default=1000, help="of a single replica (%(default)s)")
    add("--tail-rows-per-s", type=at_least_one, default=500, help="of each but the slow one, at the end (%(default)s)")
    add("--seconds", type=float, default=10.0, help="length of a run (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    alone = measure(1, options.alone_rows_per_s, options.seconds)
    many = measure(options.replicas, options.rows_per_s, options.seconds)
    limit = measure(options.replicas, UNBOUNDED, options.seconds, limit_rows=int(many["rows"]))
    rates = [options.tail_rows_per_s] * (options.replicas - 1) + [max(options.tail_rows_per_s // 10, 1)]
    tails = {name: measure_tail(rates, options.seconds / 2, copies=name == "copies") for name in ("copies", "none")}
    linear = many["rows_per_s"] / (options.replicas * options.rows_per_s)
    for name, found in (("paced", alone), ("paced", many), ("as fast as they are fed", limit)):
        report.line(
            f"{found['replicas']} replicas, {name}: {found['rows_per_s']:,.0f} rows/s; the driving process takes "
            f"{found['core_share']:.1%} of a core, {found['us_per_row']:.0f} us a row"
        )
    report.line(f"{linear:.1%} of linear")
    report.line(
        f"one of {options.replicas} replicas ten times slower: the last 5% of the rows take {tails['copies']:.1f} s "
        f"with copies, and {tails['none']:.1f} s without"
    )
    report.figures |= {
        "alone": alone,
        "many": many,
        "limit": limit,
        "linear": linear,
        "tails": tails,
        "python": sys.version,
    }
    return 0
