"""The figures of a bench as tables for people."""

from __future__ import annotations

from typing import Any

from cbatch.engine import format_bytes

Rows = list[list[str]]


def strategy_table(strategies: list[dict[str, Any]]) -> Rows:
    """Speed and waiting, one line a strategy; a factor is against the first of them."""
    first = strategies[0].get("elapsed_s", 0.0) if strategies else 0.0
    head = ["strategy", "seconds", "output tok/s", "times", "of the floor", "first token p50 / p99"]
    head += ["per token p50 / p99", "equal rows"]
    lines = [head]
    for one in strategies:
        if "error" in one:
            lines.append([one["title"], one["error"], *[""] * (len(head) - 2)])
            continue
        lines.append(
            [
                one["title"],
                f"{one['elapsed_s']:.2f}",
                f"{one['output_tokens_per_s']:,.0f}",
                f"{first / one['elapsed_s']:.2f}" if first else "",
                f"{one['floor_share']:.1%}",
                _pair(one.get("ttft_s")),
                _pair(one.get("tpot_s")),
                _equal(one),
            ]
        )
    return lines


def waste_table(strategies: list[dict[str, Any]]) -> Rows:
    """Where the work went, one line a strategy."""
    head = ["strategy", "steps", "tokens computed", "a step", "padding", "past the end", "idle slots", "preempted"]
    head += ["cache peak", "memory peak", "outside model"]
    lines = [head]
    for one in strategies:
        if "steps" not in one:
            continue
        lines.append(
            [
                one["title"],
                f"{one['steps']:,}",
                f"{one['tokens_computed']:,}",
                f"{one['tokens_per_step']:.1f}",
                f"{one['padded_token_share']:.0%}",
                f"{one['wasted_output_share']:.0%}",
                f"{one['idle_slot_share']:.0%}",
                f"{one['preemptions']:,}",
                f"{one['cache_use_peak']:.1%}",
                format_bytes(one["peak_memory_bytes"] or 0),
                f"{one['outside_model_share']:.1%}",
            ]
        )
    return lines


def memory_table(entries: list[dict[str, Any]]) -> Rows:
    """A long prompt in chunks and whole."""
    lines = [["tokens a step", "prompt", "peak memory", "first token"]]
    for one in entries:
        memory = format_bytes(one["peak_bytes"])
        lines.append([f"{one['tokens_a_step']:,}", f"{one['prompt_tokens']:,}", memory, seconds(one["elapsed_s"])])
    return lines


def cost_table(entries: list[dict[str, Any]]) -> Rows:
    """A token after longer and longer texts."""
    lines = [["context", "with cache", "without", "times"]]
    for one in entries:
        kept, anew = one["with_cache_s"], one["without_cache_s"]
        lines.append([f"{one['context_tokens']:,}", seconds(kept), seconds(anew), f"{anew / kept:.1f}"])
    return lines


def load_table(entries: list[dict[str, Any]]) -> Rows:
    """Users and how they were served, a line for each run."""
    lines = [
        ["users", "within the level", "answers", "first token p50 / p99", "tok/s a user p50 / p10", "tok/s in all"]
    ]
    for one in entries:
        paces = [1 / pace if (pace := one["tpot_s"][rank]) else 0.0 for rank in ("p50", "p90")]
        served = one["users_served_share"]
        lines.append(
            [
                f"{one['users']:,}",
                f"{served:.0%}" if served is not None else "-",
                f"{one['answers']:,}" + (f", {one['errors']} errors" if one["errors"] else ""),
                _pair(one["ttft_s"]),
                f"{paces[0]:,.0f} / {paces[1]:,.0f}",
                f"{one['output_tokens_per_s']:,.0f}",
            ]
        )
    return lines


def markdown_lines(rows: Rows) -> list[str]:
    """A Markdown table whose columns stand under one another, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(cells: list[str]) -> str:
        texts = [
            cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(texts)} |"

    rule = "|".join("-" * (width + 2) if n == 0 else "-" * (width + 1) + ":" for n, width in enumerate(widths))
    return [line(rows[0]), f"|{rule}|", *(line(row) for row in rows[1:])]


def seconds(value: float | None) -> str:
    """A short time with its unit."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _pair(percentiles: dict[str, float | None] | None) -> str:
    return f"{seconds(percentiles['p50'])} / {seconds(percentiles['p99'])}" if percentiles else ""


def _equal(one: dict[str, Any]) -> str:
    if "equal_rows_share" not in one:
        return ""
    place = one["first_difference"]
    where = f", row {place['row']} from token {place['token']}" if place else ""
    return f"{one['equal_rows_share']:.0%}{where}"
