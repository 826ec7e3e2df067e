"""Runs strategies and peers on the same work and gathers their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.cli.bench.metrics import Outputs, RunMetrics, compare_outputs, run_metrics, wanted_outputs
from cbatch.cli.bench.peers import PeerResult, run_peer
from cbatch.cli.bench.results import (
    AnyResult,
    FailedPeer,
    PeerMetrics,
    RooflineSummary,
    StrategyResult,
    Techniques,
)
from cbatch.cli.bench.roofline import DeviceRates, ModelCost, measure_rates, roofline_bound
from cbatch.cli.bench.strategies import Experiment, Strategy, TimedRun, measure_interleaved, median_run
from cbatch.cli.bench.techniques import measure_prompt_memory, measure_token_costs

if TYPE_CHECKING:
    from cbatch.cli.bench.recorder import RunRecord
    from cbatch.engine import Engine

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contenders:
    """What to run: strategies by name, names of peers, and how often."""

    strategies: dict[str, Strategy]
    peers: Sequence[str]
    rounds: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of strategies and peers, the median run of each strategy by its title, and the roofline."""

    results: list[AnyResult]
    records: dict[str, RunRecord]
    roofline: RooflineSummary


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What is measured on the device and read from the model before the runs.

    max_batch_tokens: token budget of our steps, which peers get too
    context:          tokens of the longest sequence
    """

    rates: DeviceRates
    cost: ModelCost
    max_batch_tokens: int
    context: int

    @classmethod
    def of(cls, engine: Engine) -> DeviceProfile:
        return cls(
            measure_rates(engine.device, engine.model.dtype),
            ModelCost.of(engine),
            engine.limits.max_batch_tokens,
            engine.limits.sequence.longest,
        )


def compare(
    experiment: Experiment, device: DeviceProfile, contenders: Contenders, on_progress: OnProgress
) -> Comparison:
    """Runs everything and reports the median of the rounds. Outputs are compared with those of `continuous`."""
    strategies, work = contenders.strategies, experiment.work
    runs = measure_interleaved(experiment, strategies, contenders.rounds, on_progress)
    medians = {name: median_run(records) for name, records in runs.items()}
    reference = wanted_outputs(medians.get("continuous", next(iter(medians.values()))))
    bound = roofline_bound(work, device.cost, device.rates)

    def judged(
        name: str, title: str, metrics: RunMetrics | PeerMetrics, rounds: Sequence[TimedRun], outputs: Outputs
    ) -> StrategyResult:
        difference = compare_outputs(outputs, reference)
        times = [run.elapsed_s for run in rounds]
        return StrategyResult(name, title, metrics, bound.reached(metrics.elapsed_s), times, difference)

    results: list[AnyResult] = [
        judged(name, strategies[name].title, run_metrics(record, work), runs[name], wanted_outputs(record))
        for name, record in medians.items()
    ]
    for name in contenders.peers:
        rounds = _run_peer(name, experiment, device.max_batch_tokens, contenders.rounds, on_progress)
        if rounds[-1].error:
            results.append(FailedPeer(name, rounds[-1].error))
            continue
        median = median_run(rounds)
        speed = work.output_tokens / median.elapsed_s
        metrics = PeerMetrics(median.elapsed_s, speed, median.attention)
        results.append(judged(name, name, metrics, rounds, median.outputs))
    roofline = RooflineSummary(
        copy_bytes_per_s=device.rates.bytes_per_s,
        matrix_flops_per_s=device.rates.flops_per_s,
        weights_s=bound.weights_s,
        compute_s=bound.compute_s,
        cache_s=bound.cache_s,
        floor_s=bound.seconds,
        assumed=device.cost.assumed,
    )
    return Comparison(results, {strategies[name].title: record for name, record in medians.items()}, roofline)


def _run_peer(
    name: str, experiment: Experiment, max_batch_tokens: int, rounds: int, on_progress: OnProgress
) -> list[PeerResult]:
    """All rounds of a peer, or those up to the first that fails."""
    results: list[PeerResult] = []
    for number in range(rounds):
        on_progress(f"round {number + 1} of {rounds}: {name}")
        results.append(run_peer(name, experiment.loaded, experiment.work, experiment.slots, max_batch_tokens))
        if results[-1].error:
            break
    return results


def measure_techniques(
    experiment: Experiment, context: int, names: Sequence[str], on_progress: OnProgress
) -> Techniques:
    """What chunked prefill saves of memory and the KV cache of time, for those of the two that are among the names."""
    prompt_memory = token_costs = None
    if "chunked-prefill" in names:
        on_progress("memory of a long prompt, in chunks and whole")
        prompt_memory = measure_prompt_memory(experiment, context)
    if "kv-cache" in names:
        on_progress("time of one more token after longer and longer contexts, with and without the KV cache")
        token_costs = measure_token_costs(experiment, context)
    return Techniques(prompt_memory, token_costs)
