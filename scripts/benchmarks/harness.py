"""Code of all benchmarks: rounds by turns, processes of their own, and results as lines, tables and JSON."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar, cast

ROOT = Path(__file__).resolve().parents[2]

BENCHMARKS = {
    "attention": "scripts.benchmarks.attention",
    "chat": "scripts.benchmarks.chat",
    "company": "scripts.benchmarks.company",
    "estimates": "scripts.benchmarks.estimates",
    "fairness": "scripts.benchmarks.long_prompt",
    "forms": "scripts.benchmarks.forms",
    "grid": "scripts.benchmarks.peers.grid",
    "host": "scripts.benchmarks.host",
    "images": "scripts.benchmarks.images",
    "launches": "scripts.benchmarks.launches",
    "lengths": "scripts.benchmarks.lengths",
    "loading": "scripts.benchmarks.loading",
    "lora": "scripts.benchmarks.lora",
    "products": "scripts.benchmarks.products",
    "replica-engines": "scripts.benchmarks.replica_engines",
    "replicas": "scripts.benchmarks.replicas",
    "rounding": "scripts.benchmarks.rounding",
    "rows": "scripts.benchmarks.rows",
    "sharing": "scripts.benchmarks.sharing",
    "skew": "scripts.benchmarks.skew",
    "speculation": "scripts.benchmarks.speculation.benchmark",
    "startup": "scripts.benchmarks.startup",
    "structured": "scripts.benchmarks.structured",
    "tail": "scripts.benchmarks.tail",
    "techniques": "scripts.benchmarks.techniques",
    "turns": "scripts.benchmarks.turns",
}

Way = TypeVar("Way")
Result = TypeVar("Result")


class Benchmark(Protocol):
    """A module of BENCHMARKS; its docstring is its help."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace, report: Report) -> int:
        """Measures, tells the report, and returns the exit code."""


class Report:
    """Prints results for people as they come, and writes them as one JSON object at the end.

    json_file: where the JSON goes; with `-` it goes to stdout, and nothing else does
    markdown:  print tables as Markdown
    """

    def __init__(self, json_file: str | None = None, *, markdown: bool = False) -> None:
        self.figures: dict[str, Any] = {}
        self._json_file = json_file
        self._markdown = markdown
        if json_file not in (None, "-"):
            Path(json_file).touch()  # better to fail now than after all rounds

    def line(self, text: object = "") -> None:
        if self._json_file != "-":
            print(text, flush=True)

    def table(self, rows: Sequence[Sequence[str]], *, notes: bool = False) -> None:
        """The first row is the head. notes: the last column is text, and may be long"""
        for line in in_columns(rows, markdown=self._markdown, notes=notes):
            self.line(line)

    def facts(self, named: Mapping[str, str]) -> None:
        """Facts of a measurement: a name and a sentence a line."""
        width = max(map(len, named)) + 2
        for name, text in named.items():
            self.line(f"- {name.strip()}: {text}" if self._markdown else f"{name:{width}}{text}")

    def note(self, text: str) -> None:
        """Progress, on stderr."""
        print(text, file=sys.stderr, flush=True)

    def write(self) -> None:
        if self._json_file is None:
            return
        text = json.dumps(self.figures, indent=1, default=_plain) + "\n"
        if self._json_file == "-":
            sys.stdout.write(text)
        else:
            Path(self._json_file).write_text(text)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def by_turns(ways: Mapping[Way, Callable[[], Result]], rounds: int) -> dict[Way, list[Result]]:
    """Runs each way once a round, so that a machine that gets slower meanwhile slows all ways down alike."""
    results: dict[Way, list[Result]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            results[way].append(run())
    return results


def median_by_name(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over rounds that all have the same figures."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def cpu_seconds_elsewhere() -> float:
    """CPU seconds since the machine was started that neither this process nor its finished children have used.

    They include what the host of a virtual machine took from it.
    """
    import psutil

    spent, own = psutil.cpu_times(), os.times()
    waiting = spent.idle + getattr(spent, "iowait", 0.0)
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)
    return sum(spent) - waiting - counted_twice - sum(own[:4])


def machine_facts(threads: int) -> dict[str, Any]:
    """Facts of the machine."""
    import psutil

    from cbatch.cli.bench.roofline import processor

    return {"cpu": processor(), "cores": psutil.cpu_count(logical=False) or os.cpu_count(), "threads": threads}


def in_columns(rows: Sequence[Sequence[str]], *, markdown: bool, notes: bool) -> list[str]:
    """A table as Markdown or as columns of text: a column of names, columns of figures, perhaps one of notes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if notes:
        widths[-1] = len(rows[0][-1])

    def text(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        if notes:
            cells[-1] = row[-1]
        return f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip()

    rules = ["-" * width + ":" for width in widths]
    rules[0] = "-" * (widths[0] + 1)
    if notes:
        rules[-1] = "---"
    rule = f"|-{'|-'.join(rules)}|" if markdown else "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [text(rows[0]), rule, *map(text, rows[1:])]


def at_least_one(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on.")
    return int(text)


def load_benchmark(name: str) -> Benchmark:
    return cast(Benchmark, import_module(BENCHMARKS[name]))


def summary(name: str) -> str:
    """The first line of a benchmark's docstring, without importing what it measures."""
    source = ROOT / (BENCHMARKS[name].replace(".", "/") + ".py")
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the benchmark whose name comes first, as `benchmark`, and those of all benchmarks."""
    name = arguments[0]
    benchmark = load_benchmark(name)
    parser = argparse.ArgumentParser(
        f"python -m scripts.benchmarks {name}",
        description=import_module(BENCHMARKS[name]).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_options(parser)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the figures as JSON (to stdout)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    return parser.parse_args(arguments[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in BENCHMARKS:
        width = max(map(len, BENCHMARKS))
        names = "\n".join(f"  {name:{width}}  {summary(name)}" for name in BENCHMARKS)
        print(f"usage: python -m scripts.benchmarks NAME [OPTIONS]\n\n{names}", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    options = parse(arguments)
    try:
        report = Report(options.json, markdown=options.markdown)
    except OSError as error:
        print(f"Cannot write {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    code = load_benchmark(arguments[0]).run(options, report)
    if code != 2:
        report.write()
    return code
