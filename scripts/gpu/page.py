"""The Markdown page of a run of `scripts.gpu.first_half_hour`: what was measured, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

State = Mapping[str, Any]
SUMMARY = re.compile(r"(?m)^(?:=+ )?((?:\d|no tests).* in [\d.]+s.*?)(?: =+)?$")


def test_results(output: str) -> dict[str, Any]:
    """Summary, failures and modules that could not be imported, of what pytest printed; empty if it printed none."""
    failures = re.findall(r"(?m)^((?:FAILED|ERROR) .*)$", output)
    summaries = SUMMARY.findall(output)
    return {"tests": [f"pytest: {line}" for line in summaries[-1:]], "failures": failures} if summaries else {}


def markdown(state: State, names: Sequence[str]) -> str:
    """One section for each device that stages ran on, each with its figures alone, and one for what is missing."""
    stages = state["stages"]
    lines: list[str] = []
    for device in dict.fromkeys(entry["device"] for entry in stages.values()):
        entries = {name: stages[name] for name in names if name in stages and stages[name]["device"] == device}
        lines += section(state, device, entries)
    missing = [(name, why) for name in names for why in reasons(stages.get(name))]
    lines += ["", *table(["Missing", "Why"], missing)] if missing else []
    return "\n".join(lines).strip() + "\n"


def section(state: State, device: str, entries: Mapping[str, State]) -> Iterator[str]:
    yield from ("", f"## Measured on {device}", "")
    for machine in unique(machine for machine in state["machines"] if machine["device"] == device):
        yield f"{machine['versions']}; {machine.get('driver', 'no driver')}."
    measured = [entry["results"]["machine"] for entry in entries.values() if "machine" in entry["results"]]
    if measured:
        copied, computed = measured[0]["bytes_per_s"] / 1e9, measured[0]["flops_per_s"] / 1e12
        yield f"It copies {copied:,.0f} GB/s and multiplies at {computed:,.1f} TFLOP/s."
    rows = [(name, *row) for name, entry in entries.items() for row in figures(entry["results"])]
    yield from ("", *table(["Stage", "What", "Figures"], rows))
    if goals := list(reached(entries)):
        yield from ("", *table(["Goal", "", "Figure"], goals))


def figures(results: State) -> Iterator[tuple[str, str]]:
    """The figures that were measured, as pairs of what and how much. Kernels that agree are one row."""
    for part, lines in results.items():
        if part in ("machine", "goals", "failures"):
            continue
        checks = [line for line in lines if isinstance(line, dict) and "agrees" in line]
        if checks:
            agreeing = [check for check in checks if check["agrees"]]
            yield "kernels like plain torch", f"{len(agreeing)} of {len(checks)}"
        for line in best_points(lines) if part == "sweep" else lines:
            if isinstance(line, str) or not ("failed" in line or line.get("agrees")):
                what, colon, figure = text_of(line).partition(": ")
                yield (what, figure) if colon else (part, what)


def best_points(lines: Sequence[Any]) -> Iterator[str]:
    """Of each kind of measurement in a sweep, the one that reaches the largest share."""
    points = [line for line in lines if isinstance(line, dict) and "share" in line]
    for kind in dict.fromkeys(point["kind"] for point in points):
        tried = [point for point in points if point["kind"] == kind]
        yield f"best of {len(tried)}, {text_of(max(tried, key=lambda point: point['share']))}"


def reached(entries: Mapping[str, State]) -> Iterator[tuple[str, str, str]]:
    """Each goal that was measured, once."""
    found: dict[str, Any] = {}
    for entry in entries.values():
        for goal in entry["results"].get("goals", ()):
            if goal.get("is_reached") is not None:
                found.setdefault(goal["goal"], goal)
    for text, goal in found.items():
        yield text, "reached" if goal["is_reached"] else "**missed**", goal["figure"]


def reasons(entry: State | None) -> Iterator[str]:
    """Why something of a stage is missing: nothing if all of it is there."""
    if entry is None:
        yield "not run yet"
        return
    if entry["status"] != "done":
        yield entry.get("reason", "it runs")
    results = entry["results"]
    yield from results.get("failures", ())
    for part, lines in results.items():
        if isinstance(lines, list):
            yield from (f"{part}: {line['failed']}" for line in lines if isinstance(line, dict) and "failed" in line)


def text_of(line: Any) -> str:
    return line if isinstance(line, str) else str(line["text"])


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [row_of(titles), f"|{'---|' * len(titles)}", *map(row_of, rows)]


def row_of(cells: Sequence[object]) -> str:
    texts = (re.sub(r"\s+", " ", str(cell)).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def unique(machines: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for machine in machines:
        found += [] if any(machine["versions"] == other["versions"] for other in found) else [machine]
    return found
