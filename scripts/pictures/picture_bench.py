"""Draws the pictures of the documentation, and an example of a report, from runs on this machine: docs/bench/.

    python -m scripts.pictures.picture_bench
    python -m scripts.pictures.picture_bench load step

Each picture is written twice, for light and for dark pages. If Chromium is installed, so is the report's top.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from cbatch.cli.bench.command import bench
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.page import Picture
from cbatch.cli.bench.peers import PeerSetup, run_peer
from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.strategies import ABLATIONS, STRATEGIES, Experiment, Strategy, turns
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import make_options
from scripts.pictures.look_at_page import look
from scripts.pictures.skew import plot_skew
from scripts.pictures.speculation import plot_speculation
from scripts.pictures.step import StepWatcher, plot_step
from scripts.pictures.utilisation import plot_utilisation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "bench"

SCREEN_WIDTH = 1000
"""Pixels of the screens of the report."""

NAMES, AGES = ("Felix", "Zoe", "Milo", "Luna", "Hugo", "Clara", "Jonas", "Nora"), (20, 31, 42, 53)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A bench and the pictures that are kept of it.

    arguments: of the command
    keeps:     files that the command writes
    make:      draws the one picture that is kept, if the command does not
    has_rows:  whether its work is `rows.jsonl`
    command:   which one measures
    """

    arguments: str
    keeps: tuple[str, ...]
    make: Callable[[list[str]], Figure] | None = None
    has_rows: bool = False
    command: str = "cbatch bench"


def prepare(arguments: list[str]) -> tuple[BenchOptions, Experiment, int]:
    """The options that these arguments of `cbatch bench` mean, their work on a model, and most tokens of a step."""
    with bench.make_context("bench", arguments) as context:
        options = make_options(BenchOptions, context.params)
    with open_engine(options.engine, quiet=True) as engine:
        work = options.make_workload(engine)
        return options, Experiment.of(engine, work, options.batch_size), engine.limits.max_batch_tokens


def median_records(experiment: Experiment, strategies: Sequence[Strategy], rounds: int) -> dict[str, RunRecord]:
    """Of each strategy, by its title, the run with the median time. They take turns."""
    named = {strategy.title: strategy for strategy in strategies}
    runs: dict[str, list[RunRecord]] = {title: [] for title in named}
    for strategy in strategies:
        experiment.warm_up(strategy)
    for _, title in turns(named, rounds, print):
        runs[title].append(experiment.measure(named[title]))
    return {title: sorted(same, key=lambda run: run.elapsed_s)[(rounds - 1) // 2] for title, same in runs.items()}


def draw_step(arguments: list[str]) -> Figure:
    _, experiment, _ = prepare(arguments)
    watcher = StepWatcher()
    record = experiment.measure(Strategy("continuous", watcher.run))
    assert watcher.example is not None
    return plot_step(record, watcher.example)


def draw_speculation(arguments: list[str]) -> Figure:
    options, experiment, _ = prepare(arguments)
    (record,) = median_records(experiment, [STRATEGIES["drafts"]], options.rounds).values()
    return plot_speculation(record)


def draw_utilisation(arguments: list[str]) -> Figure:
    options, experiment, max_batch_tokens = prepare(arguments)
    strategies = [STRATEGIES[name] for name in options.strategies] + [ABLATIONS[name] for name in options.ablate]
    records = median_records(experiment, strategies, options.rounds)
    setup = PeerSetup(experiment.loaded.network, experiment.work, experiment.slots, max_batch_tokens)
    others = {
        name: median_low(run_peer(name, setup)[1]["elapsed_s"] for _ in range(options.rounds)) for name in options.peer
    }
    return plot_utilisation(records, others)


def draw_skew(arguments: list[str]) -> Figure:
    command = [*SKEW.split(), *arguments, "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    return plot_skew(json.loads(printed)["points"])


SKEW = "python -m scripts.benchmarks skew"
TECHNIQUES = "--ablate kv-cache,ragged,dynamic --peer transformers-generate,transformers-cb"
DRAWINGS = {
    "report": Drawing(
        "--peer transformers-generate,transformers-cb --report report.html --plot .", ("timeline", "report.html")
    ),
    "speed": Drawing(f"{TECHNIQUES} --plot .", ("speed",)),
    "utilisation": Drawing(TECHNIQUES, ("utilisation",), draw_utilisation),
    "step": Drawing("--batch-size 6 --requests 24 --input-len 24:96 --output-len 32:96", ("step",), draw_step),
    "speculation": Drawing("rows.jsonl --batch-size 2", ("speculation",), draw_speculation, has_rows=True),
    "load": Drawing(
        "--users 1,8,32,64,128,256,512 --rounds 3 --duration 5s --think 1s --input-len 16:128 --output-len 16:128 "
        "--max-seqs 128 --target-step-ms 18 --plot .",
        ("load",),
    ),
    "skew": Drawing("--skews 0 0.25 0.5 0.75 1 1.25 1.5", ("skew",), draw_skew, command=SKEW),
}
"""By the words that name them on the command line."""


def rows() -> str:
    """Prompts that follow one template."""
    prompts = [f"Give me a JSON object with name {name} and age {age}." for name in NAMES for age in AGES]
    return "".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in prompts)


def draw(drawing: Drawing, folder: Path) -> None:
    """Runs a bench in an empty folder and keeps the files."""
    arguments = drawing.arguments.split()
    with tempfile.TemporaryDirectory() as name, chdir(name):
        if drawing.has_rows:
            Path("rows.jsonl").write_text(rows())
        print(drawing.command, drawing.arguments, flush=True)
        if drawing.make is None:
            subprocess.run(["cbatch", "bench", *arguments], check=True, stdout=subprocess.DEVNULL)
        else:
            (kept,) = drawing.keeps
            Picture(kept, partial(drawing.make, arguments)).write(Path())
        for kept in drawing.keeps:
            for file in [Path(kept)] if "." in kept else [Path(f"{kept}{end}.svg") for end in ("", "-dark")]:
                shutil.copy(file, folder)
                print(f"  {file.name}, {file.stat().st_size / 1000:,.0f} kB", flush=True)
                if file.suffix == ".html":
                    take_screens(folder / file.name)


def take_screens(page: Path) -> None:
    """Writes what stands at the top of a page, on a light and on a dark screen, beside it."""
    browser = shutil.which("chromium")
    if browser is None:
        print("  no screens of it: Chromium is not installed")
        return
    for dark in (False, True):
        target = page.with_name(f"{page.stem}{'-dark' if dark else ''}.png")
        problems = look(browser, page.read_text(), SCREEN_WIDTH, target, dark=dark, top=True)
        print("; ".join([f"  {target.name}, {target.stat().st_size / 1000:,.0f} kB", *problems]), flush=True)


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in DRAWINGS]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: not among {', '.join(DRAWINGS)}")
    for name in names or DRAWINGS:
        draw(DRAWINGS[name], FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
