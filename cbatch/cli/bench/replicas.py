"""The same work on replicas: engines in processes of their own, each with as many slots as the strategies have."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.base.request import RequestDefaults
from cbatch.batch.lines import Line, RowOptions
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.results import MeasuredRun, ReplicaMetrics
from cbatch.cli.bench.workload import Workload
from cbatch.cli.common.loading import open_replicas
from cbatch.cli.run.stats import RunStats

if TYPE_CHECKING:
    from cbatch.batch.driver import BatchDriver

POLL_SECONDS = 0.05


def measure_replicas(
    options: BenchOptions, work: Workload, on_progress: Callable[[str], None]
) -> tuple[list[MeasuredRun], int]:
    """Does the work on new replicas, once for each round after a warm-up of all of them.

    Returns the runs and the number of replicas. Raises ConfigError.
    """
    config = replace(options.engine, max_seqs=options.batch_size, prefix_cache=False, run_ahead=False)
    with open_replicas(options.replicas, config, quiet=options.is_silent) as driver:
        while any(one.state == "starting" for one in driver.each()):
            time.sleep(POLL_SECONDS)
        run_work(driver, work.warmup.repeated(driver.num_engines))
        runs = []
        for number in range(options.rounds):
            on_progress(f"round {number + 1} of {options.rounds}: replicas")
            runs.append(run_work(driver, work))
        return runs, driver.num_engines


def run_work(driver: BatchDriver, work: Workload) -> MeasuredRun:
    """Does the work once. Raises ConfigError if a request fails."""
    stats = RunStats()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    options = RowOptions(RequestDefaults(params=params, columns=("token_ids",)))
    source = driver.open(options, window=len(work.prompts))
    stats.attach(driver, source)
    requests = zip(work.prompts, work.output_lengths, strict=True)
    lines = (
        Line(index, json.dumps({"prompt_token_ids": prompt, "max_tokens": length}).encode())
        for index, (prompt, length) in enumerate(requests)
    )
    found: dict[int, bytes] = {}
    with closing(source.finished(lines)) as finished:
        for rows in finished:
            source.release([row.position for row in rows])
            stats.count(rows)
            for row in rows:
                if row.has_failed:
                    raise ConfigError(f"A request failed on a replica: {row.outcome.error_message}")
                found[row.index] = row.data
    stats.detach()
    metrics = ReplicaMetrics(
        elapsed_s=stats.elapsed_s,
        output_tokens_per_s=work.output_tokens / max(stats.elapsed_s, 1e-9),
        ttft_s=stats.ttft_s,
        tpot_s=stats.tpot_s,
        steps=stats.engines.num_steps,
        preemptions=stats.engines.num_preemptions,
        drafted_tokens=stats.engines.num_drafted_tokens,
        accepted_tokens=stats.engines.num_accepted_tokens,
        replicas=stats.replicas,
    )
    return MeasuredRun([json.loads(found[index])["token_ids"] for index in sorted(found)], metrics)
