"""The results of a bench as tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cbatch.base.units import format_bytes
from cbatch.cli.bench.load.results import LoadResult
from cbatch.cli.bench.results import AnyResult, FailedPeer, OutputDifference, PeerMetrics, RunMetrics
from cbatch.cli.bench.roofline import DeviceRates, RooflineBound
from cbatch.cli.bench.techniques import PromptMemory, TokenCost
from cbatch.cli.common.percentiles import Percentiles
from cbatch.cli.run.stats import ReplicaFigures

Table = list[dict[str, str]]
"""Lines of cells by heading. The first line has all headings; where others lack one, the cell is empty."""


def strategy_table(results: Sequence[AnyResult]) -> Table:
    """Speed and latency, one line a strategy or peer. Speedups are relative to the first of them."""
    table: Table = []
    first_s: float | None = None
    for result in results:
        if isinstance(result, FailedPeer):
            table.append({"strategy": result.name, "seconds": result.error})
            continue
        metrics = result.metrics
        first_s = first_s or metrics.elapsed_s
        latency = None if isinstance(metrics, PeerMetrics) else (metrics.ttft_s, metrics.tpot_s)
        table.append(
            {
                "strategy": result.title,
                "seconds": f"{metrics.elapsed_s:.2f}",
                "output tok/s": f"{metrics.output_tokens_per_s:,.0f}",
                "speedup": f"{first_s / metrics.elapsed_s:.2f}",
                "of roofline": f"{result.floor_share:.1%}",
                "first token p50 / p99": _pair(latency[0]) if latency else "",
                "per token p50 / p99": _pair(latency[1]) if latency else "",
                "equal outputs": _agreement(result.difference),
            }
        )
    return table


def waste_table(runs: Mapping[str, RunMetrics]) -> Table:
    """What was computed and what was wasted, one line a strategy. `runs`: metrics by title."""
    has_drafts = any(metrics.drafted_tokens for metrics in runs.values())
    return [
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


def _acceptance(metrics: RunMetrics) -> str:
    drafted, accepted = metrics.drafted_tokens, metrics.accepted_tokens
    return f"{accepted:,} of {drafted:,}, {accepted / drafted:.0%}" if drafted else "-"


def replica_table(replicas: Iterable[ReplicaFigures]) -> Table:
    """What each replica did, one line for each."""
    return [
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


def memory_table(entries: Iterable[PromptMemory]) -> Table:
    """A long prompt in chunks and whole."""
    return [
        {
            "tokens a step": f"{entry.tokens_a_step:,}",
            "prompt": f"{entry.prompt_tokens:,}",
            "peak memory": format_bytes(entry.peak_bytes),
            "first token": seconds(entry.elapsed_s),
        }
        for entry in entries
    ]


def cost_table(entries: Iterable[TokenCost]) -> Table:
    """One more token after longer and longer contexts."""
    return [
        {
            "context": f"{entry.context_tokens:,}",
            "with cache": seconds(entry.with_cache_s),
            "without": seconds(entry.without_cache_s),
            "speedup": f"{entry.without_cache_s / entry.with_cache_s:.1f}",
        }
        for entry in entries
    ]


def load_table(runs: Mapping[int, LoadResult]) -> Table:
    """How users were served, one line a run. `runs`: results by number of users."""
    table: Table = []
    for users, result in runs.items():
        p50, p10 = (1 / tpot if tpot else 0.0 for tpot in (result.tpot_s.p50, result.tpot_s.p90))
        served = result.users_served
        table.append(
            {
                "users": f"{users:,}",
                "within SLO": f"{served:.0%}" if served is not None else "-",
                "answers": f"{result.answers:,}" + (f", {result.errors} errors" if result.errors else ""),
                "first token p50 / p99": _pair(result.ttft_s),
                "tok/s a user p50 / p10": f"{p50:,.0f} / {p10:,.0f}",
                "tok/s in all": f"{result.output_tokens_per_s:,.0f}",
            }
        )
    return table


def roofline_sentence(bound: RooflineBound, rates: DeviceRates) -> str:
    """What the device could do at best, and by which of its rates."""
    return (
        f"The roofline allows {seconds(bound.seconds)}: this device copies {rates.bytes_per_s / 1e9:,.0f} GB/s and "
        f"multiplies {rates.flops_per_s / 1e12:,.2f} TFLOP/s."
    )


def markdown_lines(table: Table) -> list[str]:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    if not table:
        return []
    head = list(table[0])
    lines = [head, *([line.get(heading, "") for heading in head] for line in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "|".join("-" * (width + 2) if n == 0 else "-" * (width + 1) + ":" for n, width in enumerate(widths))
    formats = [f"{{:{'>' if n else '<'}{width}}}" for n, width in enumerate(widths)]
    shown = [f"| {' | '.join(formats).format(*cells)} |" for cells in lines]
    return [shown[0], f"|{rule}|", *shown[1:]]


def seconds(value: float | None) -> str:
    """A short time with its unit."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _pair(times: Percentiles) -> str:
    return f"{seconds(times.p50)} / {seconds(times.p99)}"


def _agreement(difference: OutputDifference) -> str:
    place = difference.first_difference
    where = f", request {place.row} from token {place.token}" if place else ""
    return f"{difference.equal_rows_share:.0%}{where}"
