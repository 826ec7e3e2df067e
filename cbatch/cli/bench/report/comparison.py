"""The report of a comparison: the headline, three figures, one table, the details, and its pictures."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cbatch.base.units import format_bytes
from cbatch.cli.bench import units
from cbatch.cli.bench.report.page import Detail, KeyFigure, Page, Picture, Table
from cbatch.cli.bench.results import (
    AnyResult,
    ComparisonReport,
    FailedPeer,
    OutputDifference,
    ReplicaMetrics,
    RunMetrics,
    StrategyResult,
)
from cbatch.cli.bench.timeline import draw_timeline, side_by_side, time_shares
from cbatch.cli.common.percentiles import Percentiles
from cbatch.cli.run.stats import ReplicaFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 100
"""Columns of the timeline if stdout is not a terminal."""

ALTS = {
    "timeline": "One lane for each slot over time: what it computed, for which request, and when it was empty.",
    "utilisation": "Share of the slots that compute over time, by kind of work, for each strategy.",
    "speed": "Output tokens a second, time to the first token and time of further tokens, for each strategy.",
    "step": "One step: the tokens of all requests in one line, what each attends to, and the cache blocks read.",
    "speculation": "Tokens of some requests in each step: their own, accepted and rejected drafts.",
}


def draw(report: ComparisonReport) -> dict[str, Picture]:
    """All pictures that there is data for, by the stems of their files.

    The step is of the last of `side_by_side`; drafts are those of continuous batching, or of the first that has some.
    """
    from cbatch.cli.bench.pictures.slots import plot_timeline, plot_utilisation
    from cbatch.cli.bench.pictures.speculation import plot_speculation
    from cbatch.cli.bench.pictures.speed import plot_speed
    from cbatch.cli.bench.pictures.step import plot_step
    from cbatch.cli.bench.pictures.style import svg_texts

    records, done, pair = report.records, report.done, side_by_side(report.records)
    peers = {one.title: one.metrics.elapsed_s for one in done if not isinstance(one.metrics, RunMetrics)}
    figures: dict[str, Callable[[], Figure]] = {}
    if pair:
        figures["timeline"] = lambda: plot_timeline(pair)
    if records:
        figures["utilisation"] = lambda: plot_utilisation(records, peers)
    if done:
        figures["speed"] = lambda: plot_speed(done)
    if pair and (example := (record := list(pair.values())[-1]).example) is not None:
        figures["step"] = lambda: plot_step(record, example)
    ordered = sorted(records.items(), key=lambda item: item[0] != "continuous")
    if drafted := [record for _, record in ordered if record.drafted]:
        figures["speculation"] = lambda: plot_speculation(drafted[0])
    return {name: Picture(ALTS[name], svg) for name, svg in svg_texts(figures).items()}


def page_of(report: ComparisonReport, pictures: Mapping[str, Picture]) -> Page:
    """pictures: those of `draw`, or none"""
    done, work, options = report.done, report.work, report.options
    subject = _subject(done)
    baseline = _baseline(done, subject)
    rounds = options.rounds
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal else WIDTH
    counted = f"Figures are those of the median of {rounds} rounds, by turns." if rounds > 1 else "Each was run once."
    return Page(
        machine=report.machine,
        model=report.model,
        headline=_headline(subject, baseline),
        figures=_figures(report, subject, baseline),
        picture=pictures.get("timeline"),
        table=strategy_table(report.strategies, subject),
        facts=(
            f"{len(work.prompts):,} requests ({work.source}), {work.prompt_tokens:,} prompt and "
            f"{work.output_tokens:,} output tokens, {options.batch_size:,} slots, median of {rounds}"
        ),
        method=(
            f"{counted} Strategies have the same model and kernels, and padding is computed like other tokens, so that "
            "only the strategy differs."
        ),
        remarks=[
            *([report.gain.sentence] if report.gain is not None else []),
            *(f"{one.name}: {one.error}" for one in report.strategies if isinstance(one, FailedPeer)),
        ],
        details=_details(report, pictures),
        drawing=draw_timeline(side_by_side(report.records), width),
    )


def _subject(done: Sequence[StrategyResult]) -> StrategyResult:
    """The subject of the page: replicas if there are any, or continuous batching, or the last of our own ways."""
    replicas = [result for result in done if isinstance(result.metrics, ReplicaMetrics)]
    ours = [result for result in done if isinstance(result.metrics, RunMetrics)]
    continuous = [result for result in ours if result.name == "continuous"]
    return (replicas or continuous or ours[-1:] or list(done))[0]


def _baseline(done: Sequence[StrategyResult], subject: StrategyResult) -> StrategyResult | None:
    """The rival of the subject: static batches, or the first of the others; of replicas, one engine."""
    order = ("continuous", "static") if isinstance(subject.metrics, ReplicaMetrics) else ("static",)
    others = {result.name: result for result in done if result is not subject}
    return next((others[name] for name in order if name in others), next(iter(others.values()), None))


def _in_words(result: StrategyResult) -> str:
    names = {"one by one": "one request at a time", "continuous": "continuous batching"}
    return names.get(result.title, result.title)


def _headline(subject: StrategyResult, baseline: StrategyResult | None) -> str:
    words = _in_words(subject)
    words = words[:1].upper() + words[1:]
    if baseline is None:
        return f"{words}: {units.per_second(subject.metrics.output_tokens_per_s)} output tokens a second"
    speedup = baseline.metrics.elapsed_s / max(subject.metrics.elapsed_s, 1e-9)
    return f"{words}: {units.times(speedup)} the speed of {_in_words(baseline)}"


def _figures(report: ComparisonReport, subject: StrategyResult, baseline: StrategyResult | None) -> list[KeyFigure]:
    """Three figures, each beside that of the baseline."""
    useful = {title: units.share(time_shares(record)["useful"]) for title, record in report.records.items()}
    figures: dict[str, Callable[[StrategyResult], str | None]] = {
        "output tokens a second": lambda result: units.per_second(result.metrics.output_tokens_per_s)
    }
    if subject.title in useful:
        figures["of the slots’ time is useful work"] = lambda result: useful.get(result.title)
    else:
        figures["for all requests"] = lambda result: units.duration(result.metrics.elapsed_s)
    if _times(subject, "ttft_s") is not None:
        figures["to the first token (median)"] = lambda result: (
            units.duration(times.p50) if (times := _times(result, "ttft_s")) else None
        )
    found = []
    for label, figure in figures.items():
        other = figure(baseline) if baseline is not None else None
        note = f"{_in_words(baseline)}: {other}" if baseline is not None and other else ""
        found.append(KeyFigure(figure(subject) or "", label, note))
    return found


def _times(result: StrategyResult, name: str) -> Percentiles | None:
    """Times of requests; None for peers, whose steps nobody sees."""
    return getattr(result.metrics, name, None)


def strategy_table(results: Sequence[AnyResult], subject: StrategyResult) -> Table:
    """Speed and latency, one line a strategy or peer. Speedups are relative to the first of them."""
    lines = []
    first_s = next((one.metrics.elapsed_s for one in results if isinstance(one, StrategyResult)), 0.0)
    for result in results:
        if isinstance(result, FailedPeer):
            lines.append({"strategy": result.name})
            continue
        metrics = result.metrics
        lines.append(
            {
                "strategy": result.title,
                "time": units.duration(metrics.elapsed_s),
                "output tokens/s": units.per_second(metrics.output_tokens_per_s),
                "speedup": units.times(first_s / max(metrics.elapsed_s, 1e-9)),
                "first token p50 / p99": pair(_times(result, "ttft_s")),
                "per token p50 / p99": pair(_times(result, "tpot_s")),
                "of roofline": units.share(result.floor_share),
                "equal outputs": _agreement(result.difference),
            }
        )
    return Table.of(lines, strong=list(results).index(subject))


def pair(times: Percentiles | None) -> str:
    """Median and 99th percentile."""
    return f"{units.duration(times.p50)} / {units.duration(times.p99)}" if times else ""


def _agreement(difference: OutputDifference) -> str:
    place = difference.first_difference
    where = f", request {place.row} from token {place.token}" if place else ""
    return units.share(difference.equal_rows_share) + where


def _details(report: ComparisonReport, pictures: Mapping[str, Picture]) -> list[Detail]:
    techniques, rates = report.techniques, report.rates
    metrics = {result.title: result.metrics for result in report.done}
    runs = {title: one for title, one in metrics.items() if isinstance(one, RunMetrics)}
    replicas = [one for of in metrics.values() if isinstance(of, ReplicaMetrics) for one in of.replicas]
    memory = [
        {
            "tokens a step": f"{entry.tokens_a_step:,}",
            "prompt": f"{entry.prompt_tokens:,}",
            "peak memory": format_bytes(entry.peak_bytes),
            "first token": units.duration(entry.elapsed_s),
        }
        for entry in techniques.prompt_memory or []
    ]
    costs = [
        {
            "context": f"{entry.context_tokens:,}",
            "with cache": units.duration(entry.with_cache_s),
            "without": units.duration(entry.without_cache_s),
            "speedup": units.times(entry.without_cache_s / entry.with_cache_s),
        }
        for entry in techniques.token_costs or []
    ]
    rounds = range(max(len(result.elapsed_s_of_rounds) for result in report.done))
    by_round = Table(
        ["strategy", *(f"round {n + 1}" for n in rounds)],
        [[result.title, *map(units.duration, result.elapsed_s_of_rounds)] for result in report.done],
    )
    roofline = (
        f"The roofline allows {units.duration(report.bound.seconds)}: this device copies "
        f"{rates.bytes_per_s / 1e9:,.0f} GB/s and multiplies {rates.flops_per_s / 1e12:,.2f} TFLOP/s."
    )
    return [
        Detail("The roofline", [roofline, *report.assumed]),
        Detail("What the slots did", [pictures.get("utilisation"), waste_table(runs)]),
        Detail("Speed and latency", [pictures.get("speed")]),
        Detail("One step of the engine", [pictures.get("step")]),
        Detail("Drafts", [pictures.get("speculation")]),
        Detail("Replicas", [replica_table(replicas)]),
        Detail("Memory of a long prompt", [Table.of(memory)]),
        Detail("Time of one more token", [Table.of(costs)]),
        Detail("Every round", [by_round if len(rounds) > 1 else None], is_printed=False),
    ]


def waste_table(runs: Mapping[str, RunMetrics]) -> Table:
    """The computed and the wasted tokens, one line a strategy.  runs: metrics by title"""
    has_drafts = any(metrics.drafted_tokens for metrics in runs.values())
    return Table.of(
        [
            {
                "strategy": title,
                "steps": f"{metrics.steps:,}",
                "tokens computed": f"{metrics.tokens_computed:,}",
                "a step": f"{metrics.tokens_per_step:.1f}",
                "padding": f"{metrics.padded_token_share:.0%}",
                "past the end": f"{metrics.wasted_output_share:.0%}",
                "idle slots": f"{metrics.idle_slot_share:.0%}",
                "preempted": f"{metrics.preemptions:,}",
                "cache peak": f"{metrics.cache_use_peak:.1%}",
                "memory peak": format_bytes(metrics.peak_memory_bytes or 0),
                "outside model": f"{metrics.outside_model_share:.1%}",
            }
            | ({"drafts accepted": _acceptance(metrics)} if has_drafts else {})
            for title, metrics in runs.items()
        ]
    )


def _acceptance(metrics: RunMetrics) -> str:
    drafted, accepted = metrics.drafted_tokens, metrics.accepted_tokens
    return f"{accepted:,} of {drafted:,}, {accepted / drafted:.0%}" if drafted else ""


def replica_table(replicas: Iterable[ReplicaFigures]) -> Table:
    """The work of each replica, one line for each."""
    return Table.of(
        [
            {
                "replica": one.name,
                "requests": f"{one.rows:,}",
                "output tokens": f"{one.output_tokens:,}",
                "steps": f"{one.steps:,}",
                "preempted": f"{one.preemptions:,}",
                "copies": f"{one.copies:,}",
                "deaths": f"{one.deaths:,}",
            }
            for one in replicas
        ]
    )
