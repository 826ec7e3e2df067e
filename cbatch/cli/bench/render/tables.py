"""The results of a bench as tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cbatch.cli.bench.load.results import LoadResult
from cbatch.cli.bench.metrics import OutputDifference, RunMetrics
from cbatch.cli.bench.results import AnyResult, FailedPeer, PromptMemory, TokenCost
from cbatch.cli.common.percentiles import Percentiles
from cbatch.engine import format_bytes

Table = list[list[str]]
"""Lines of cells; the first line holds the headings."""


def strategy_table(results: Sequence[AnyResult]) -> Table:
    """Speed and latency, one line a strategy or peer. Speedups are relative to the first of them."""
    head = ["strategy", "seconds", "output tok/s", "speedup", "of roofline", "first token p50 / p99"]
    head += ["per token p50 / p99", "equal outputs"]
    table = [head]
    for result in results:
        if isinstance(result, FailedPeer):
            table.append([result.title, result.error, *[""] * (len(head) - 2)])
            continue
        metrics = result.metrics
        table.append(
            [
                result.title,
                f"{metrics.elapsed_s:.2f}",
                f"{metrics.output_tokens_per_s:,.0f}",
                _speedup(results[0], metrics.elapsed_s),
                f"{result.floor_share:.1%}",
                _pair(metrics.ttft_s) if isinstance(metrics, RunMetrics) else "",
                _pair(metrics.tpot_s) if isinstance(metrics, RunMetrics) else "",
                _agreement(result.difference),
            ]
        )
    return table


def waste_table(runs: Mapping[str, RunMetrics]) -> Table:
    """What was computed and what was wasted, one line a strategy. `runs`: metrics by title."""
    head = ["strategy", "steps", "tokens computed", "a step", "padding", "past the end", "idle slots", "preempted"]
    head += ["cache peak", "memory peak", "outside model"]
    table = [head]
    for title, metrics in runs.items():
        table.append(
            [
                title,
                f"{metrics.steps:,}",
                f"{metrics.tokens_computed:,}",
                f"{metrics.tokens_per_step:.1f}",
                f"{metrics.padded_token_share:.0%}",
                f"{metrics.wasted_output_share:.0%}",
                f"{metrics.idle_slot_share:.0%}",
                f"{metrics.preemptions:,}",
                f"{metrics.cache_use_peak:.1%}",
                format_bytes(metrics.peak_memory_bytes or 0),
                f"{metrics.outside_model_share:.1%}",
            ]
        )
    return table


def memory_table(entries: Iterable[PromptMemory]) -> Table:
    """A long prompt in chunks and whole."""
    table = [["tokens a step", "prompt", "peak memory", "first token"]]
    for entry in entries:
        memory = format_bytes(entry.peak_bytes)
        table.append([f"{entry.tokens_a_step:,}", f"{entry.prompt_tokens:,}", memory, seconds(entry.elapsed_s)])
    return table


def cost_table(entries: Iterable[TokenCost]) -> Table:
    """One more token after longer and longer contexts."""
    table = [["context", "with cache", "without", "speedup"]]
    for entry in entries:
        kept, recomputed = entry.with_cache_s, entry.without_cache_s
        speedup = f"{recomputed / kept:.1f}"
        table.append([f"{entry.context_tokens:,}", seconds(kept), seconds(recomputed), speedup])
    return table


def load_table(runs: Mapping[int, LoadResult]) -> Table:
    """How users were served, one line a run. `runs`: results by number of users."""
    table = [["users", "within SLO", "answers", "first token p50 / p99", "tok/s a user p50 / p10", "tok/s in all"]]
    for users, result in runs.items():
        speeds = [1 / tpot if tpot else 0.0 for tpot in (result.tpot_s.p50, result.tpot_s.p90)]
        served = result.users_served
        table.append(
            [
                f"{users:,}",
                f"{served:.0%}" if served is not None else "-",
                f"{result.answers:,}" + (f", {result.errors} errors" if result.errors else ""),
                _pair(result.ttft_s),
                f"{speeds[0]:,.0f} / {speeds[1]:,.0f}",
                f"{result.output_tokens_per_s:,.0f}",
            ]
        )
    return table


def markdown_lines(table: Table) -> list[str]:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]

    def padded(cells: list[str]) -> str:
        texts = [
            cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(texts)} |"

    rule = "|".join("-" * (width + 2) if n == 0 else "-" * (width + 1) + ":" for n, width in enumerate(widths))
    return [padded(table[0]), f"|{rule}|", *(padded(line) for line in table[1:])]


def seconds(value: float | None) -> str:
    """A short time with its unit."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _speedup(first: AnyResult, elapsed_s: float) -> str:
    return "" if isinstance(first, FailedPeer) else f"{first.metrics.elapsed_s / elapsed_s:.2f}"


def _pair(times: Percentiles) -> str:
    return f"{seconds(times.p50)} / {seconds(times.p99)}"


def _agreement(difference: OutputDifference) -> str:
    place = difference.first_difference
    where = f", request {place.row} from token {place.token}" if place else ""
    return f"{difference.equal_rows_share:.0%}{where}"
