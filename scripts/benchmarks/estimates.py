"""How near `cbatch run --check --estimate` comes to the run itself.

    python -m scripts.benchmarks estimates --rows 1500

Estimates a file of rows and then runs it, both by the command, in processes of their own. Prints the estimated range,
what the run took, and by which factor the likely value is off. The bundled demo model, or that of --model, gets the
questions of `scripts/prompts.jsonl`, long outputs of random lengths, outputs that end by chance, and long prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.harness import ROOT, Report, at_least_one

Row = dict[str, Any]


def questions(source: random.Random, count: int) -> list[Row]:
    """Outputs that end by themselves."""
    rows = map(json.loads, (ROOT / "scripts" / "prompts.jsonl").read_text().splitlines())
    prompts = [row["prompt"] for row in rows if "prompt" in row]
    return [{"prompt": source.choice(prompts), "temperature": 0.7, "max_tokens": 200} for _ in range(count)]


def long_outputs(source: random.Random, count: int) -> list[Row]:
    return [{"prompt": f"Question {n}", "ignore_eos": True, "max_tokens": source.randint(8, 200)} for n in range(count)]


def open_ends(source: random.Random, count: int) -> list[Row]:
    """Outputs that end by chance, many of them late."""
    return [{"prompt": f"Row {n}: the ", "raw": True, "temperature": 1.2, "max_tokens": 400} for n in range(count)]


def long_prompts(source: random.Random, count: int) -> list[Row]:
    return [
        {"prompt_token_ids": [source.randrange(300, 1000) for _ in range(300)], "ignore_eos": True, "max_tokens": 4}
        for _ in range(count)
    ]


WORKLOADS: dict[str, Callable[[random.Random, int], list[Row]]] = {
    "questions": questions,
    "long outputs": long_outputs,
    "open ends": open_ends,
    "long prompts": long_prompts,
}


def command(arguments: Sequence[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cbatch", "run", *arguments, "-q"],
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
        text=True,
    )
    return done.stdout


def measure(rows: list[Row], model: Sequence[str]) -> tuple[Row, Row]:
    """The estimate, and the figures of the run."""
    with tempfile.TemporaryDirectory() as folder:
        source, stats = Path(folder) / "in.jsonl", Path(folder) / "stats.json"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        estimate = json.loads(command([str(source), *model, "--check", "--estimate"]))["estimate"]
        command([str(source), *model, "-o", str(Path(folder) / "out.jsonl"), "--stats", str(stats)])
        return estimate, json.loads(stats.read_text())


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="folder or hub id (the demo model)")
    add("--rows", type=at_least_one, default=1500, help="(%(default)s)")
    add("--slow", action="store_true", help="compute by transformers, so that the trial ends before most outputs do")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="(all)")


def run(options: argparse.Namespace, report: Report) -> int:
    model = ["-m", options.model] if options.model else []
    model += ["--attention", "reference"] if options.slow else []
    table = [["rows", "estimated seconds", "the run", "factor", "estimated output tokens", "the run", "factor", "by"]]
    for name in options.workloads:
        estimate, stats = measure(WORKLOADS[name](random.Random(0), options.rows), model)
        report.figures[name] = {"estimate": estimate, "stats": stats}
        cells = [name]
        for span, real in (
            (estimate["seconds"], stats["elapsed_s"]),
            (estimate["output_tokens"], stats["output_tokens"]),
        ):
            cells.append(f"{span['likely']:,.0f} ({span['least']:,.0f}-{span['most']:,.0f})")
            cells += [f"{real:,.0f}", f"{span['likely'] / real:.2f}"]
        table.append([*cells, estimate["held_back_by"]])
    report.table(table)
    return 0
