"""Strategies and peers on the same work: runs them in turn and gathers what there is to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.cli.bench.costs import prompt_memory, token_costs
from cbatch.cli.bench.metrics import difference, figures
from cbatch.cli.bench.peers import run_peer
from cbatch.cli.bench.roofline import ModelCost, Rates, floor_of, measure_rates
from cbatch.cli.bench.strategies import Ground, Strategy, measure_in_turn, median_run

if TYPE_CHECKING:
    from cbatch.cli.bench.recorder import Trace
    from cbatch.engine import Engine

Tell = Callable[[str], None]


@dataclass(slots=True)
class Comparison:
    """What came of it: one entry for each strategy and peer, the traces by title, and what the device can do."""

    strategies: list[dict[str, Any]]
    traces: dict[str, Trace]
    roofline: dict[str, Any]
    techniques: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Device:
    """What is measured of the device, and asked of the model, before the runs.

    budget:  tokens of a step of ours, which peers get too
    context: tokens of the longest sequence
    """

    rates: Rates
    cost: ModelCost
    budget: int
    context: int

    @classmethod
    def of(cls, engine: Engine) -> Device:
        return cls(
            measure_rates(engine.device, engine.model.dtype),
            ModelCost.of(engine),
            engine.scheduler.max_batch_tokens,
            engine.scheduler.room.longest,
        )


def compare(
    ground: Ground, device: Device, strategies: dict[str, Strategy], peers: list[str], rounds: int, tell: Tell
) -> Comparison:
    """Runs everything; the medians of the rounds are what is reported."""
    runs = measure_in_turn(ground, strategies, rounds, tell)
    medians = {name: median_run(traces) for name, traces in runs.items()}
    reference = medians.get("continuous", next(iter(medians.values())))
    floor = floor_of(ground.work, device.cost, device.rates)
    found = [
        {"strategy": name, "title": strategies[name].title}
        | figures(trace, ground.work)
        | {"floor_share": floor.reached(trace.elapsed_s)}
        | {"elapsed_s_of_rounds": [run.elapsed_s for run in runs[name]]}
        | difference(trace, reference)
        for name, trace in medians.items()
    ]
    found += [_peer(name, ground, device, floor.reached, reference, rounds, tell) for name in peers]
    roofline = {
        "copy_bytes_per_s": device.rates.bytes_per_s,
        "matrix_flops_per_s": device.rates.flops_per_s,
        "weights_s": floor.weights_s,
        "compute_s": floor.compute_s,
        "cache_s": floor.cache_s,
        "floor_s": floor.seconds,
        "assumed": list(device.cost.assumed),
    }
    return Comparison(found, {strategies[name].title: trace for name, trace in medians.items()}, roofline)


def _peer(
    name: str,
    ground: Ground,
    device: Device,
    reached: Callable[[float], float],
    reference: Trace,
    rounds: int,
    tell: Tell,
) -> dict[str, Any]:
    """The entry of a peer; where it does not get through, a sentence that says why."""
    results = []
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}: {name}")
        results.append(run_peer(name, ground.loaded, ground.work, ground.slots, device.budget))
        if results[-1].trouble:
            return {"strategy": name, "title": name, "error": results[-1].trouble}
    result = median_run(results)
    return {
        "strategy": name,
        "title": name,
        "elapsed_s": result.elapsed_s,
        "output_tokens_per_s": ground.work.output_tokens / result.elapsed_s,
        "attention": result.attention,
        "floor_share": reached(result.elapsed_s),
        "elapsed_s_of_rounds": [one.elapsed_s for one in results],
    } | difference(result.trace(ground.slots), reference)


def techniques(ground: Ground, device: Device, names: list[str], tell: Tell) -> dict[str, Any]:
    """What chunks save of memory, and the cache of time, as texts grow, where those are among the names."""
    found: dict[str, Any] = {}
    if "chunked-prefill" in names:
        tell("memory of a long prompt, in chunks and whole")
        found["prompt_memory"] = prompt_memory(ground, device.context)
    if "kv-cache" in names:
        tell("time of a token after longer and longer texts, with and without the cache")
        found["token_costs"] = token_costs(ground, device.context)
    return found
