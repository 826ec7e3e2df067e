"""Strategies and peers on the same work: runs them in turn and gathers what there is to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.cli.bench.metrics import compare_outputs, run_metrics
from cbatch.cli.bench.peers import run_peer
from cbatch.cli.bench.roofline import DeviceRates, ModelCost, measure_rates, roofline_bound
from cbatch.cli.bench.strategies import Experiment, Strategy, measure_interleaved, median_run
from cbatch.cli.bench.techniques import measure_prompt_memory, measure_token_costs

if TYPE_CHECKING:
    from cbatch.cli.bench.recorder import RunRecord
    from cbatch.engine import Engine

OnProgress = Callable[[str], None]


@dataclass(slots=True)
class ComparisonResult:
    """What came of it: one entry for each strategy and peer, the traces by title, and what the device can do."""

    strategies: list[dict[str, Any]]
    records: dict[str, RunRecord]
    roofline: dict[str, Any]
    techniques: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What is measured of the device, and asked of the model, before the runs.

    budget:  tokens of a step of ours, which peers get too
    context: tokens of the longest sequence
    """

    rates: DeviceRates
    cost: ModelCost
    budget: int
    context: int

    @classmethod
    def of(cls, engine: Engine) -> DeviceProfile:
        return cls(
            measure_rates(engine.device, engine.model.dtype),
            ModelCost.of(engine),
            engine.scheduler.max_batch_tokens,
            engine.scheduler.room.longest,
        )


def compare(
    experiment: Experiment,
    device: DeviceProfile,
    strategies: dict[str, Strategy],
    peers: list[str],
    rounds: int,
    on_progress: OnProgress,
) -> ComparisonResult:
    """Runs everything; the medians of the rounds are what is reported."""
    runs = measure_interleaved(experiment, strategies, rounds, on_progress)
    medians = {name: median_run(records) for name, records in runs.items()}
    reference = medians.get("continuous", next(iter(medians.values())))
    floor = roofline_bound(experiment.work, device.cost, device.rates)
    found = [
        {"strategy": name, "title": strategies[name].title}
        | run_metrics(record, experiment.work)
        | {"floor_share": floor.reached(record.elapsed_s)}
        | {"elapsed_s_of_rounds": [run.elapsed_s for run in runs[name]]}
        | compare_outputs(record, reference)
        for name, record in medians.items()
    ]
    found += [_peer(name, experiment, device, floor.reached, reference, rounds, on_progress) for name in peers]
    roofline = {
        "copy_bytes_per_s": device.rates.bytes_per_s,
        "matrix_flops_per_s": device.rates.flops_per_s,
        "weights_s": floor.weights_s,
        "compute_s": floor.compute_s,
        "cache_s": floor.cache_s,
        "floor_s": floor.seconds,
        "assumed": list(device.cost.assumed),
    }
    return ComparisonResult(found, {strategies[name].title: record for name, record in medians.items()}, roofline)


def _peer(
    name: str,
    experiment: Experiment,
    device: DeviceProfile,
    reached: Callable[[float], float],
    reference: RunRecord,
    rounds: int,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """The entry of a peer; where it does not get through, a sentence that says why."""
    results = []
    for number in range(rounds):
        on_progress(f"round {number + 1} of {rounds}: {name}")
        results.append(run_peer(name, experiment.loaded, experiment.work, experiment.slots, device.budget))
        if results[-1].error:
            return {"strategy": name, "title": name, "error": results[-1].error}
    result = median_run(results)
    return {
        "strategy": name,
        "title": name,
        "elapsed_s": result.elapsed_s,
        "output_tokens_per_s": experiment.work.output_tokens / result.elapsed_s,
        "attention": result.attention,
        "floor_share": reached(result.elapsed_s),
        "elapsed_s_of_rounds": [one.elapsed_s for one in results],
    } | compare_outputs(result.record(experiment.slots), reference)


def techniques(
    experiment: Experiment, device: DeviceProfile, names: list[str], on_progress: OnProgress
) -> dict[str, Any]:
    """What chunks save of memory, and the cache of time, as texts grow, where those are among the names."""
    found: dict[str, Any] = {}
    if "chunked-prefill" in names:
        on_progress("memory of a long prompt, in chunks and whole")
        found["prompt_memory"] = measure_prompt_memory(experiment, device.context)
    if "kv-cache" in names:
        on_progress("time of a token after longer and longer texts, with and without the cache")
        found["token_costs"] = measure_token_costs(experiment, device.context)
    return found
