"""The same work on replicas: engines in processes of their own, each with as many slots as the strategies have."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.base.request_defaults import RequestDefaults
from cbatch.batch.lines import Line
from cbatch.batch.row_options import RowOptions
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.workload import Outputs, Workload
from cbatch.cli.common.replicas import open_replicas
from cbatch.cli.run.stats import RunStats

if TYPE_CHECKING:
    from cbatch.batch.driver import BatchDriver


POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """One run of the work: what each request got, the seconds it all took, and what the replicas did."""

    outputs: Outputs
    elapsed_s: float
    stats: RunStats


def measure_replicas(options: BenchOptions, work: Workload, on_progress: Callable[[str], None]) -> list[ReplicaRun]:
    """Does the work on new replicas, once for each round after a warm-up of all of them. Raises ConfigError."""
    config = replace(options.engine, max_seqs=options.batch_size, prefix_cache=False, run_ahead=False)
    with open_replicas(options.replicas, config, quiet=options.is_silent) as driver:
        while any(one.state == "starting" for one in driver.each()):
            time.sleep(POLL_SECONDS)
        run_work(driver, work.warmup.repeated(driver.num_engines))
        runs = []
        for number in range(options.rounds):
            on_progress(f"round {number + 1} of {options.rounds}: replicas")
            runs.append(run_work(driver, work))
    return runs


def run_work(driver: BatchDriver, work: Workload) -> ReplicaRun:
    """Does the work once. Raises ConfigError if a request fails."""
    stats = RunStats()
    stats.attach(driver)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    options = RowOptions(RequestDefaults(params=params, with_token_ids=True))
    source = driver.open(options, window=len(work.prompts), observer=stats)
    found: dict[int, bytes] = {}
    with closing(source.finished(_lines(work))) as finished:
        for rows in finished:
            source.release([row.position for row in rows])
            for row in rows:
                stats.count(row)
                if row.outcome.error_code is not None:
                    raise ConfigError(f"A request failed on a replica: {row.outcome.error_message}")
                found[row.index] = row.data
    stats.detach()
    return ReplicaRun([json.loads(found[index])["token_ids"] for index in sorted(found)], stats.elapsed_s, stats)


def _lines(work: Workload) -> Iterator[Line]:
    for index, (prompt, length) in enumerate(zip(work.prompts, work.output_lengths, strict=True)):
        yield Line(index, json.dumps({"prompt_token_ids": prompt, "max_tokens": length}).encode())
