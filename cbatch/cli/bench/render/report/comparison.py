"""What the report of a comparison says: the headline, three figures, one table, and the details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.render import tables, units
from cbatch.cli.bench.render.report.common import Occasion, html_table, machine_detail, setting
from cbatch.cli.bench.render.report.html import Detail, KeyFigure, Page, Picture, Table
from cbatch.cli.bench.render.timeline import time_shares
from cbatch.cli.bench.results import (
    AnyResult,
    ComparisonReport,
    FailedPeer,
    PeerMetrics,
    ReplicaMetrics,
    RunMetrics,
    StrategyResult,
)

IN_WORDS = {"one by one": "one request at a time", "continuous": "continuous batching"}

ALTS = {
    "Timeline": "One lane for each slot over time: what it computed, for which request, and when it was empty.",
    "Utilisation": "Share of the slots that compute over time, by kind of work, for each strategy.",
    "Speed": "Output tokens a second, time to the first token and time of further tokens, for each strategy.",
    "One step": "One step: the tokens of all requests in one line, what each attends to, and the cache blocks read.",
    "Speculation": "Tokens of some requests in each step: their own, accepted and rejected drafts.",
}


def comparison_page(report: ComparisonReport, pictures: Mapping[str, Picture], occasion: Occasion) -> Page:
    """The page of a comparison.  pictures: by the titles that they have in `plots`"""
    done = [result for result in report.strategies if isinstance(result, StrategyResult)]
    subject = _subject(done)
    baseline = _baseline(done, subject)
    work, options = report.work, report.options
    return Page(
        kicker=f"cbatch bench · {occasion.date}",
        headline=_headline(subject, baseline),
        figures=_figures(subject, baseline, report.records),
        picture=pictures.get("Timeline"),
        table=_table(report.strategies, subject, baseline),
        method=(
            f"{len(work.prompts):,} requests with {work.prompt_tokens:,} prompt and {work.output_tokens:,} output "
            f"tokens ({work.source}) were done in each of these ways, with {options.batch_size:,} slots. "
            f"{_rounds(options.rounds)} Strategies have the same model and kernels, and padding is computed like other "
            f"tokens, so that only the strategy differs. {setting(report.machine, report.model, occasion)}"
        ),
        command=occasion.command,
        remarks=[
            *([report.gain.sentence] if report.gain is not None else []),
            *(f"{one.name}: {one.error}" for one in report.strategies if isinstance(one, FailedPeer)),
        ],
        details=list(_details(report, done, pictures)),
    )


def _rounds(count: int) -> str:
    return f"Figures are those of the median of {count} rounds, by turns." if count > 1 else "Each was run once."


def _subject(done: Sequence[StrategyResult]) -> StrategyResult:
    """What the page is about: replicas if there are any, or continuous batching, or the last of our own ways."""
    replicas = [result for result in done if isinstance(result.metrics, ReplicaMetrics)]
    ours = [result for result in done if isinstance(result.metrics, RunMetrics)]
    continuous = [result for result in ours if result.name == "continuous"]
    return (replicas or continuous or ours[-1:] or list(done))[0]


def _baseline(done: Sequence[StrategyResult], subject: StrategyResult) -> StrategyResult | None:
    """What the subject is compared with: static batches, or the first of the others; of replicas, one engine."""
    order = ("continuous", "static") if isinstance(subject.metrics, ReplicaMetrics) else ("static",)
    others = {result.name: result for result in done if result is not subject}
    return next((others[name] for name in order if name in others), next(iter(others.values()), None))


def _in_words(result: StrategyResult) -> str:
    return IN_WORDS.get(result.title, result.title)


def _speedup(result: StrategyResult, baseline: StrategyResult) -> float:
    return baseline.metrics.elapsed_s / max(result.metrics.elapsed_s, 1e-9)


def _headline(subject: StrategyResult, baseline: StrategyResult | None) -> str:
    words = _in_words(subject)
    words = words[:1].upper() + words[1:]
    if baseline is None:
        return f"{words}: {units.per_second(subject.metrics.output_tokens_per_s)} output tokens a second"
    return f"{words}: {units.times(_speedup(subject, baseline))} the speed of {_in_words(baseline)}"


def _figures(
    subject: StrategyResult, baseline: StrategyResult | None, records: Mapping[str, RunRecord]
) -> list[KeyFigure]:
    """Three figures, each beside that of the baseline."""

    def figure(label: str, both: tuple[str, str | None]) -> KeyFigure:
        value, other = both
        has_note = baseline is not None and other is not None
        return KeyFigure(value, label, f"{_in_words(baseline)}: {other}" if has_note and baseline else "")

    rates = units.per_second(subject.metrics.output_tokens_per_s)
    other_rates = units.per_second(baseline.metrics.output_tokens_per_s) if baseline else None
    found = [figure("output tokens a second", (rates, other_rates))]
    useful = {title: units.share(time_shares(record)["useful"]) for title, record in records.items()}
    if subject.title in useful:
        other = useful.get(baseline.title) if baseline else None
        found.append(figure("of the slots’ time is useful work", (useful[subject.title], other)))
    else:
        other = units.duration(baseline.metrics.elapsed_s) if baseline else None
        found.append(figure("for all requests", (units.duration(subject.metrics.elapsed_s), other)))
    first = _first_token(subject)
    if first is not None:
        found.append(figure("to the first token (median)", (first, _first_token(baseline) if baseline else None)))
    return found


def _first_token(result: StrategyResult) -> str | None:
    metrics = result.metrics
    return None if isinstance(metrics, PeerMetrics) else units.duration(metrics.ttft_s.p50)


def _table(results: Sequence[AnyResult], subject: StrategyResult, baseline: StrategyResult | None) -> Table:
    """One line a strategy or peer."""
    columns = ["", "time", "output tokens/s", "first token, median", "idle slots"]
    if baseline is not None:
        columns.insert(3, f"times {baseline.title}")
    lines = []
    for result in results:
        if isinstance(result, FailedPeer):
            lines.append([result.name, *[units.NOTHING] * (len(columns) - 1)])
            continue
        metrics = result.metrics
        line = [
            result.title,
            units.duration(metrics.elapsed_s),
            units.per_second(metrics.output_tokens_per_s),
            _first_token(result) or units.NOTHING,
            units.share(metrics.idle_slot_share) if isinstance(metrics, RunMetrics) else units.NOTHING,
        ]
        if baseline is not None:
            line.insert(3, units.times(_speedup(result, baseline)))
        lines.append(line)
    return Table(columns, lines, strong=list(results).index(subject))


def _details(report: ComparisonReport, done: Sequence[StrategyResult], pictures: Mapping[str, Picture]) -> list[Detail]:
    techniques = report.techniques
    rounds = max(len(result.elapsed_s_of_rounds) for result in done)
    by_round = Table(
        ["strategy", *(f"round {n + 1}" for n in range(rounds))],
        [[result.title, *map(units.duration, result.elapsed_s_of_rounds)] for result in done],
    )
    found: list[tuple[str, list[str | Table | Picture | None]]] = [
        ("What the slots did", [pictures.get("Utilisation"), html_table(tables.waste_table(report.runs))]),
        ("Speed and latency", [pictures.get("Speed"), html_table(tables.strategy_table(report.strategies))]),
        ("One step of the engine", [pictures.get("One step")]),
        ("Drafts", [pictures.get("Speculation")]),
        ("Replicas", [html_table(tables.replica_table(report.replicas))]),
        ("Memory of a long prompt", [html_table(tables.memory_table(techniques.prompt_memory or []))]),
        ("Time of one more token", [html_table(tables.cost_table(techniques.token_costs or []))]),
        ("Every round", [by_round if rounds > 1 else None]),
        ("The roofline", [tables.roofline_sentence(report.bound, report.rates), *report.assumed]),
    ]
    kept = [Detail(title, [part for part in parts if part is not None]) for title, parts in found]
    return [*(detail for detail in kept if detail.parts), machine_detail(report.machine, report.model)]
