"""Runs strategies and peers on the same work and gathers their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.cli.bench.metrics import Outputs, compare_outputs, run_metrics, wanted_outputs
from cbatch.cli.bench.peers import run_peer
from cbatch.cli.bench.results import (
    AnyResult,
    FailedPeer,
    PeerSummary,
    RooflineSummary,
    StrategyResult,
    Techniques,
)
from cbatch.cli.bench.roofline import DeviceRates, ModelCost, RooflineBound, measure_rates, roofline_bound
from cbatch.cli.bench.strategies import Experiment, Strategy, measure_interleaved, median_run
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
    strategies = contenders.strategies
    runs = measure_interleaved(experiment, strategies, contenders.rounds, on_progress)
    medians = {name: median_run(records) for name, records in runs.items()}
    reference = wanted_outputs(medians.get("continuous", next(iter(medians.values()))))
    bound = roofline_bound(experiment.work, device.cost, device.rates)
    results: list[AnyResult] = [
        StrategyResult(
            name=name,
            title=strategies[name].title,
            metrics=run_metrics(record, experiment.work),
            floor_share=bound.reached(record.elapsed_s),
            elapsed_s_of_rounds=[run.elapsed_s for run in runs[name]],
            difference=compare_outputs(wanted_outputs(record), reference),
        )
        for name, record in medians.items()
    ]
    for name in contenders.peers:
        peer_rounds = _PeerRounds(name, contenders.rounds, bound, reference)
        results.append(peer_rounds.run(experiment, device.max_batch_tokens, on_progress))
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


@dataclass(frozen=True, slots=True)
class _PeerRounds:
    """The rounds of one peer, and what its result is judged by."""

    name: str
    rounds: int
    bound: RooflineBound
    reference: Outputs

    def run(self, experiment: Experiment, max_batch_tokens: int, on_progress: OnProgress) -> PeerSummary | FailedPeer:
        runs = []
        for number in range(self.rounds):
            on_progress(f"round {number + 1} of {self.rounds}: {self.name}")
            runs.append(run_peer(self.name, experiment.loaded, experiment.work, experiment.slots, max_batch_tokens))
            if runs[-1].error:
                return FailedPeer(self.name, runs[-1].error)
        median = median_run(runs)
        return PeerSummary(
            name=self.name,
            elapsed_s=median.elapsed_s,
            output_tokens_per_s=experiment.work.output_tokens / median.elapsed_s,
            attention=median.attention,
            floor_share=self.bound.reached(median.elapsed_s),
            elapsed_s_of_rounds=[run.elapsed_s for run in runs],
            difference=compare_outputs(median.outputs, self.reference),
        )


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
