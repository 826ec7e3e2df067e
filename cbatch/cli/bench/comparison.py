"""Strategies and peers on the same work: how they are measured, and the report of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from cbatch.base.units import format_bytes
from cbatch.cli.bench import units
from cbatch.cli.bench.gain import gain_of, gain_sentence
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.page import Detail, KeyFigure, Page, Picture, Table
from cbatch.cli.bench.peers import PeerError, PeerSetup, run_peer
from cbatch.cli.bench.pictures.plots import plot_speed, plot_timeline
from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord, count_drafts
from cbatch.cli.bench.roofline import ModelCost, describe, measure_rates, roofline_bound
from cbatch.cli.bench.strategies import (
    ABLATIONS,
    STRATEGIES,
    Experiment,
    OnProgress,
    turns,
)
from cbatch.cli.bench.timeline import time_shares
from cbatch.cli.bench.workload import Outputs, Workload
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.percentiles import percentiles

Result = Mapping[str, Any]
"""One of the `strategies` of `--json`: a strategy or a peer. A peer that failed has only an `error`."""


class MeasuredRun(NamedTuple):
    """One run of the work, its figures as `--json` names them, and its steps, if they are known."""

    outputs: Outputs
    figures: dict[str, Any]
    record: RunRecord | None = None


def measure(options: BenchOptions, on_progress: OnProgress) -> Page:
    """Runs all strategies and peers. Raises ConfigError."""
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        about, limits = describe(engine), engine.limits
        work = options.make_workload(engine)
        rates, cost = measure_rates(engine.device, engine.model.dtype), ModelCost.of(engine)
        experiment = Experiment.of(engine, work, options.batch_size)
    bound = roofline_bound(work, cost, rates)
    names = dict.fromkeys([*options.strategies, *(["continuous"] if options.ablate else [])])
    strategies = {name: STRATEGIES[name] for name in names}
    strategies |= {f"no-{name}": ABLATIONS[name] for name in options.ablate}
    runs: dict[str, list[MeasuredRun]] = {name: [] for name in strategies}
    for strategy in strategies.values():
        experiment.warm_up(strategy)
    for _, name in turns(strategies, options.rounds, on_progress):
        record = experiment.measure(strategies[name])
        runs[name].append(MeasuredRun(record.outputs, run_figures(record, work), record))
    medians = {name: median_run(rounds) for name, rounds in runs.items()}
    records = {strategies[name].title: run.record for name, run in medians.items() if run.record is not None}
    reference = medians.get("continuous", next(iter(medians.values()))).outputs

    def judged(name: str, title: str, rounds: Sequence[MeasuredRun]) -> Result:
        run, times = median_run(rounds), [one.figures["elapsed_s"] for one in rounds]
        share = bound.reached(run.figures["elapsed_s"])
        judgement = {"floor_share": share, "elapsed_s_of_rounds": times, **compare_outputs(run.outputs, reference)}
        return {"strategy": name, "title": title, **run.figures, **judgement}

    def by_peer(name: str) -> MeasuredRun:
        setup = PeerSetup(experiment.loaded.network, work, experiment.slots, limits.max_batch_tokens)
        return MeasuredRun(*run_peer(name, setup))

    found = [judged(name, strategies[name].title, rounds) for name, rounds in runs.items()]
    for name in options.peer:
        try:
            done = [by_peer(name) for _ in turns([name], options.rounds, on_progress)]
            found.append(judged(name, name, done))
        except PeerError as error:
            found.append({"strategy": name, "title": name, "error": str(error)})
    data = about | {
        "work": {
            "source": work.source,
            "requests": len(work.prompts),
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            "slots": options.batch_size,
            "rounds": options.rounds,
            "seed": options.seed,
        },
        "strategies": found,
        "roofline": {
            "copy_bytes_per_s": rates.bytes_per_s,
            "matrix_flops_per_s": rates.flops_per_s,
            **asdict(bound),
            "floor_s": bound.seconds,
            "assumed": cost.assumed,
        },
    }
    static, continuous = records.get("static batches"), records.get("continuous")
    if static is not None and continuous is not None:
        data["gain"] = gain_of(static, continuous, work)
    return page_of(data, records)


def median_run(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    """The run with the median time; of two in the middle, the faster one."""
    return sorted(runs, key=lambda run: run.figures["elapsed_s"])[(len(runs) - 1) // 2]


def run_figures(record: RunRecord, work: Workload) -> dict[str, Any]:
    """Figures of one run, named as in `--json`: times in seconds, shares in 0..1, memory in bytes."""
    steps, elapsed, num_steps = record.steps, max(record.elapsed_s, 1e-9), max(len(record.steps), 1)
    per_token = [
        (request.last - request.first) / (request.wanted - 1)
        for request in record.requests
        if request.first is not None and request.last is not None and request.wanted > 1
    ]
    model_s, step_s = sum(step.model_s for step in steps), sum(step.end - step.start for step in steps)
    generated, computed = sum(len(request.tokens) for request in record.requests), record.tokens(*TOKEN_KINDS)
    slot_steps, blocks_used = sum(step.useful_slots for step in steps), [step.blocks_used for step in steps]
    drafted, accepted = count_drafts(steps)
    first = [request.first for request in record.requests if request.first is not None]
    return {
        "elapsed_s": record.elapsed_s,
        "output_tokens_per_s": work.output_tokens / elapsed,
        "total_tokens_per_s": (work.prompt_tokens + work.output_tokens) / elapsed,
        "ttft_s": percentiles(first),
        "tpot_s": percentiles(per_token),
        "padded_token_share": record.tokens("padding") / max(record.tokens("prefill", "padding"), 1),
        "wasted_output_share": (generated - work.output_tokens) / max(generated, 1),
        "idle_slot_share": 1 - slot_steps / max(record.slots * len(steps), 1),
        "steps": len(steps),
        "tokens_computed": computed,
        "tokens_per_step": computed / num_steps,
        "slots_in_use": slot_steps / num_steps,
        "cache_use_mean": sum(blocks_used) / num_steps / record.num_blocks,
        "cache_use_peak": max(blocks_used, default=0) / record.num_blocks,
        "preemptions": record.preemptions,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "model_s": model_s,
        "outside_model_share": 1 - model_s / step_s if step_s else 0.0,
        "peak_memory_bytes": record.peak_bytes,
    }


def compare_outputs(outputs: Outputs, reference: Outputs) -> dict[str, Any]:
    """The share of equal outputs, and the first token that differs: of which row, and which one of it."""
    rows = range(len(outputs))
    unequal = [row for row in rows if outputs[row] != reference[row]]
    place = None
    if unequal:
        here, there = outputs[unequal[0]], reference[unequal[0]]
        shorter = min(len(here), len(there))
        token = next((n for n in range(shorter) if here[n] != there[n]), shorter)
        place = {"row": unequal[0], "token": token}
    return {"equal_rows_share": 1 - len(unequal) / max(len(outputs), 1), "first_difference": place}


def page_of(data: dict[str, Any], records: Mapping[str, RunRecord]) -> Page:
    """data: the object that `--json` prints; records: the median runs of the strategies, by their titles"""
    work, rounds = data["work"], data["work"]["rounds"]
    done = [one for one in data["strategies"] if "error" not in one]
    pair = {title: records[title] for title in ("static batches", "continuous") if title in records}
    subject, baseline = _rivals(done, records)
    if baseline is None:
        headline = f"{_in_words(subject)}: {units.number(subject['output_tokens_per_s'])} output tokens a second"
    else:
        speedup = units.times(baseline["elapsed_s"] / max(subject["elapsed_s"], 1e-9))
        headline = f"{_in_words(subject)}: {speedup} the speed of {_in_words(baseline)}"
    counted = f"Figures are those of the median of {rounds} rounds, by turns." if rounds > 1 else "Each was run once."
    return Page(
        data=data,
        headline=headline[:1].upper() + headline[1:],
        figures=_figures(records, subject, baseline),
        picture=Picture("timeline", partial(plot_timeline, pair)) if pair else None,
        table=strategy_table(data["strategies"], subject),
        facts=(
            f"{work['requests']:,} requests ({work['source']}), {work['prompt_tokens']:,} prompt and "
            f"{work['output_tokens']:,} output tokens, {work['slots']:,} slots, median of {rounds}"
        ),
        method=(
            f"{counted} Strategies have the same model and kernels, and padding is computed like other tokens, so that "
            "only the strategy differs."
        ),
        remarks=[
            *([gain_sentence(data["gain"])] if "gain" in data else []),
            *(f"{one['title']}: {one['error']}" for one in data["strategies"] if "error" in one),
        ],
        details=_details(data, done, records),
    )


def _rivals(results: Sequence[Result], records: Mapping[str, RunRecord]) -> tuple[Result, Result | None]:
    """The subject of the page, and what it is compared with.

    The subject is continuous batching, or the last of our own ways. Its rival is static batches, or the first of the
    others.
    """
    done = {one["strategy"]: one for one in results}
    ours = [one for one in results if one["title"] in records] or list(done.values())[:1]
    subject = done.get("continuous") or ours[-1]
    others = [done[name] for name in ("static", *done) if name in done and done[name] is not subject]
    return subject, next(iter(others), None)


def _in_words(result: Result) -> str:
    title: str = result["title"]
    return {"one by one": "one request at a time", "continuous": "continuous batching"}.get(title, title)


def _figures(records: Mapping[str, RunRecord], subject: Result, baseline: Result | None) -> list[KeyFigure]:
    """Three figures, each beside that of the baseline; peers have fewer, for nobody sees their steps."""
    useful = {title: units.share(time_shares(record)["useful"]) for title, record in records.items()}
    figures: dict[str, Callable[[Result], str | None]] = {
        "output tokens a second": lambda one: units.number(one["output_tokens_per_s"]),
        "of the slots’ time is useful work": lambda one: useful.get(one["title"]),
        "for all requests": lambda one: units.duration(one["elapsed_s"]),
        "to the first token (median)": lambda one: units.duration(one["ttft_s"]["p50"]) if "ttft_s" in one else None,
    }
    del figures["for all requests" if subject["title"] in useful else "of the slots’ time is useful work"]
    found = []
    for label, figure in figures.items():
        other = figure(baseline) if baseline is not None else None
        note = f"{_in_words(baseline)}: {other}" if baseline is not None and other else ""
        if (value := figure(subject)) is not None:
            found.append(KeyFigure(value, label, note))
    return found


def strategy_table(results: Sequence[Result], subject: Result) -> Table:
    """Speed and latency, one line a strategy or peer. Speedups are relative to the first of them."""
    first_s = next((one["elapsed_s"] for one in results if "error" not in one), 0.0)
    lines = []
    for one in results:
        line = {"strategy": one["title"]}
        if "error" not in one:
            place = one["first_difference"]
            where = f", request {place['row']} from token {place['token']}" if place else ""
            line |= {
                "time": units.duration(one["elapsed_s"]),
                "output tokens/s": units.number(one["output_tokens_per_s"]),
                "speedup": units.times(first_s / max(one["elapsed_s"], 1e-9)),
                "first token p50 / p99": units.pair(one.get("ttft_s")),
                "per token p50 / p99": units.pair(one.get("tpot_s")),
                "of roofline": units.share(one["floor_share"]),
                "equal outputs": units.share(one["equal_rows_share"]) + where,
            }
        lines.append(line)
    return Table.of(lines, strong=list(results).index(subject))


WASTE = {
    "strategy": "{title}",
    "steps": "{steps:,}",
    "tokens computed": "{tokens_computed:,}",
    "a step": "{tokens_per_step:.1f}",
    "padding": "{padded_token_share:.0%}",
    "past the end": "{wasted_output_share:.0%}",
    "idle slots": "{idle_slot_share:.0%}",
    "preempted": "{preemptions:,}",
    "cache peak": "{cache_use_peak:.1%}",
    "memory peak": "{memory}",
    "outside model": "{outside_model_share:.1%}",
}
"""The columns of a table, and their cells."""


def waste_table(runs: Sequence[Result]) -> Table:
    has_drafts = any(one["drafted_tokens"] for one in runs)

    def acceptance(run: Result) -> str:
        drafted, accepted = run["drafted_tokens"], run["accepted_tokens"]
        return f"{accepted:,} of {drafted:,}, {accepted / drafted:.0%}" if drafted else ""

    more = [{"memory": format_bytes(one["peak_memory_bytes"] or 0), "drafts": acceptance(one)} for one in runs]
    columns = WASTE | ({"drafts accepted": "{drafts}"} if has_drafts else {})
    found = [{**one, **words} for one, words in zip(runs, more, strict=True)]
    return Table.of([{head: words.format_map(one) for head, words in columns.items()} for one in found])


def _details(data: Mapping[str, Any], done: Sequence[Result], records: Mapping[str, RunRecord]) -> list[Detail]:
    roofline = data["roofline"]
    allows = (
        f"The roofline allows {units.duration(roofline['floor_s'])}: this device copies "
        f"{roofline['copy_bytes_per_s'] / 1e9:,.0f} GB/s and multiplies "
        f"{roofline['matrix_flops_per_s'] / 1e12:,.2f} TFLOP/s."
    )
    return [
        Detail("The roofline", [allows, *roofline["assumed"]]),
        Detail("What the slots did", [waste_table([one for one in done if one["title"] in records])]),
        Detail("Speed and latency", [Picture("speed", partial(plot_speed, done))]),
    ]
