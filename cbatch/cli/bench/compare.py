"""Runs strategies and peers on the same work and gathers their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.bench import results
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.peers import PeerError, PeerResult, PeerSetup, run_peer
from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.replicas import ReplicaRun, measure_replicas
from cbatch.cli.bench.roofline import ModelCost, RooflineBound, measure_rates, roofline_bound
from cbatch.cli.bench.strategies import Experiment, measure_interleaved
from cbatch.cli.bench.techniques import measure_techniques
from cbatch.cli.bench.workload import Outputs, Workload, read_workload, skewed_workload, synthetic_workload
from cbatch.cli.common.loading import open_engine
from cbatch.runtime.memory import release_memory

OnProgress = Callable[[str], None]


def measure_comparison(options: BenchOptions, on_progress: OnProgress) -> results.ComparisonReport:
    """Runs all strategies and peers, and measures what two techniques are worth. Raises ConfigError."""
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        machine, model, limits = results.Machine.of(engine), results.describe_model(engine), engine.limits
        work, device = make_workload(options, engine, next(iter(options.skew), None)), engine.device
        rates, cost = measure_rates(engine.device, engine.model.dtype), ModelCost.of(engine)
        experiment = Experiment(engine.loaded, cache_of(engine), work, options.batch_size)
    bound = roofline_bound(work, cost, rates)
    strategies, records = compare(experiment, options, bound, limits.max_batch_tokens, on_progress)
    techniques = measure_techniques(experiment, limits.sequence.longest, options.ablate, on_progress)
    if options.replicas.are_given:
        del experiment, engine  # the first replica may need the memory that the weights take here
        release_memory(device)
        strategies.append(_compare_replicas(options, work, bound, records, on_progress))
    return results.ComparisonReport(
        options=options,
        machine=machine,
        model=model,
        work=work,
        strategies=strategies,
        records=records,
        rates=rates,
        bound=bound,
        assumed=cost.assumed,
        techniques=techniques,
    )


def compare(
    experiment: Experiment, options: BenchOptions, bound: RooflineBound, max_batch_tokens: int, on_progress: OnProgress
) -> tuple[list[results.AnyResult], dict[str, RunRecord]]:
    """The median of all rounds of each strategy and peer, and the records of the former by their titles.

    Outputs are compared with those of `continuous`. Peers get steps of `max_batch_tokens` tokens, if they have steps.
    """
    work, strategies = experiment.work, options.chosen_strategies()
    runs = measure_interleaved(experiment, strategies, options.rounds, on_progress)
    medians = {name: median_run(records) for name, records in runs.items()}
    records = {strategies[name].title: record for name, record in medians.items()}
    reference = _reference(records)

    def judged(
        name: str, title: str, metrics: results.RunMetrics | results.PeerMetrics, rounds: Rounds, outputs: Outputs
    ) -> results.StrategyResult:
        times = [run.elapsed_s for run in rounds]
        share, difference = bound.reached(metrics.elapsed_s), results.compare_outputs(outputs, reference)
        return results.StrategyResult(name, title, metrics, share, times, difference)

    found: list[results.AnyResult] = [
        judged(name, strategies[name].title, results.run_metrics(record, work), runs[name], record.outputs)
        for name, record in medians.items()
    ]
    for name in options.peer:
        # Only here, because it loads the model once more, with transformers.
        setup = PeerSetup(experiment.loaded.network, work, experiment.slots, max_batch_tokens)
        rounds: list[PeerResult] = []
        try:
            for number in range(options.rounds):
                on_progress(f"round {number + 1} of {options.rounds}: {name}")
                rounds.append(run_peer(name, setup))
        except PeerError as error:
            found.append(results.FailedPeer(name, str(error)))
            continue
        peer = median_run(rounds)
        metrics = results.PeerMetrics(peer.elapsed_s, work.output_tokens / peer.elapsed_s, peer.attention)
        found.append(judged(name, name, metrics, rounds, peer.outputs))
    return found, records


def _reference(records: Mapping[str, RunRecord]) -> Outputs:
    """The outputs that all others are compared with, from the records of strategies by their titles."""
    return records.get("continuous", next(iter(records.values()))).outputs


def _compare_replicas(
    options: BenchOptions,
    work: Workload,
    bound: RooflineBound,
    records: Mapping[str, RunRecord],
    on_progress: OnProgress,
) -> results.StrategyResult:
    """The median run of the work on replicas, beside what the strategies did in this process."""
    runs = measure_replicas(options, work, on_progress)
    run, reference = median_run(runs), _reference(records)
    metrics = results.replica_metrics(run, work)
    return results.StrategyResult(
        "replicas",
        "1 replica" if len(metrics.replicas) == 1 else f"{len(metrics.replicas)} replicas",
        metrics,
        bound.reached(metrics.elapsed_s),
        [one.elapsed_s for one in runs],
        results.compare_outputs(run.outputs, reference),
    )


AnyRun = TypeVar("AnyRun", RunRecord, PeerResult, ReplicaRun)
Rounds = Sequence[RunRecord] | Sequence[PeerResult]


def median_run(runs: list[AnyRun]) -> AnyRun:
    """The run with the median time; of two in the middle, the faster one."""
    return sorted(runs, key=lambda run: run.elapsed_s)[(len(runs) - 1) // 2]


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
