"""Runs strategies, peers and replicas on the same work and gathers their results.

Replicas are engines in processes of their own, each with as many slots as the strategies have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.base.request import RequestDefaults
from cbatch.base.units import format_count
from cbatch.batch.lines import Line, RowOptions
from cbatch.cli.bench import results
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.peers import PeerError, PeerSetup, run_peer
from cbatch.cli.bench.results import MeasuredRun, ReplicaMetrics, median_run
from cbatch.cli.bench.roofline import ModelCost, measure_rates, roofline_bound
from cbatch.cli.bench.strategies import Experiment, measure_interleaved
from cbatch.cli.bench.techniques import measure_techniques
from cbatch.cli.bench.workload import Workload, read_workload, skewed_workload, synthetic_workload
from cbatch.cli.common.loading import open_engine, open_replicas
from cbatch.cli.run.stats import RunStats
from cbatch.runtime.memory import release_memory

if TYPE_CHECKING:
    from cbatch.batch.driver import BatchDriver

POLL_SECONDS = 0.05

OnProgress = Callable[[str], None]


def measure_comparison(options: BenchOptions, on_progress: OnProgress) -> results.ComparisonReport:
    """Runs all strategies and peers, and measures what two techniques are worth. Raises ConfigError."""
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        machine, model, limits = results.Machine.of(engine), results.describe_model(engine), engine.limits
        work, device = make_workload(options, engine, next(iter(options.skew), None)), engine.device
        rates, cost = measure_rates(engine.device, engine.model.dtype), ModelCost.of(engine)
        experiment = Experiment(engine.loaded, cache_of(engine), work, options.batch_size)
    bound = roofline_bound(work, cost, rates)
    strategies = options.chosen_strategies()
    runs = {
        name: [MeasuredRun(record.outputs, results.run_metrics(record, work), record) for record in rounds]
        for name, rounds in measure_interleaved(experiment, strategies, options.rounds, on_progress).items()
    }
    medians = {name: median_run(rounds) for name, rounds in runs.items()}
    records = {strategies[name].title: run.record for name, run in medians.items() if run.record is not None}
    reference = medians.get("continuous", next(iter(medians.values()))).outputs

    def judged(name: str, title: str, rounds: Sequence[MeasuredRun]) -> results.StrategyResult:
        run, times = median_run(rounds), [one.metrics.elapsed_s for one in rounds]
        share, difference = bound.reached(run.metrics.elapsed_s), results.compare_outputs(run.outputs, reference)
        return results.StrategyResult(name, title, run.metrics, share, times, difference)

    found: list[results.AnyResult] = [judged(name, strategies[name].title, rounds) for name, rounds in runs.items()]
    for name in options.peer:
        try:
            peer_runs = measure_peer(name, experiment, limits.max_batch_tokens, options.rounds, on_progress)
            found.append(judged(name, name, peer_runs))
        except PeerError as error:
            found.append(results.FailedPeer(name, str(error)))
    techniques = measure_techniques(experiment, limits.sequence.longest, options.ablate, on_progress)
    if options.replicas.are_given:
        del experiment, engine  # the first replica may need the memory that the weights take here
        release_memory(device)
        replica_runs, count = measure_replicas(options, work, on_progress)
        found.append(judged("replicas", format_count(count, "replica"), replica_runs))
    return results.ComparisonReport(
        options=options,
        machine=machine,
        model=model,
        work=work,
        strategies=found,
        records=records,
        rates=rates,
        bound=bound,
        assumed=cost.assumed,
        techniques=techniques,
    )


def cache_of(engine: Engine) -> EngineConfig:
    """The engine's configuration with a cache of this size: the same for all runs, however many sequences they have."""
    slots = engine.limits.state_slots or None
    return replace(engine.config, kv_blocks=engine.limits.num_blocks, state_slots=slots, kv_cache_memory=None)


def make_workload(options: BenchOptions, engine: Engine, skew: float | None) -> Workload:
    """The rows of the file that the options name, or synthetic ones. Raises ConfigError.

    skew: of the lengths of synthetic rows, instead of their distribution
    """
    if options.prompts is not None:
        return read_workload(options.prompts, engine, options.format)
    vocabulary, context = engine.model.vocab_size, engine.limits.sequence.longest
    if skew is not None:
        return skewed_workload(options.requests, *options.mean_lengths, skew, vocabulary, context, options.seed)
    return synthetic_workload(options.requests, *options.lengths, vocabulary, context, options.seed)


def measure_peer(
    name: str, experiment: Experiment, max_batch_tokens: int, rounds: int, on_progress: OnProgress
) -> list[MeasuredRun]:
    """Does the work with a peer, which loads the model once more. Raises PeerError if it does not get through."""
    setup = PeerSetup(experiment.loaded.network, experiment.work, experiment.slots, max_batch_tokens)
    runs = []
    for number in range(rounds):
        on_progress(f"round {number + 1} of {rounds}: {name}")
        runs.append(MeasuredRun(*run_peer(name, setup)))
    return runs


def measure_replicas(options: BenchOptions, work: Workload, on_progress: OnProgress) -> tuple[list[MeasuredRun], int]:
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
