"""cbatch beside other engines on a CPU: a grid of models, weight formats and kinds of work.

    python -m scripts.benchmarks grid --python openvino=~/ov/bin/python --python llama.cpp=~/lc/bin/python

Every system gets the same random models, quantized to the same number of bits in its own way, and the same requests of
random tokens; all outputs are greedy and have a fixed length. Each system has a process of its own, which loads a model
and stays. For each kind of work, every system does a warm-up that does not count, and then the work by turns: so what
else happens on the machine disturbs all of them. Tokens differ from turn to turn.

The grid takes hours, so what is measured is added to a file (--results) after each round. The same command goes on
where the last one ended; with more --rounds it measures on. `--table` only prints what is there.

With --weights Q8_0,Q4_0, cbatch reads the file that llama.cpp has made.

Kinds of work: one (a request of 64 + 256 tokens), mixed (32 requests, prompts of 16 to 512 and outputs of 8 to 256
tokens, log-uniform), many (128 of 64 + 64), long (4 of 6,000 + 32), shared (64 of 1,064 + 64, which begin with the same
1,000 tokens).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from scripts.benchmarks.harness import Report, at_least_one
from scripts.benchmarks.peers import benchmark
from scripts.benchmarks.peers.benchmark import PeerProcess, call, default_threads, interpreter, machine_facts
from scripts.benchmarks.peers.table import OURS, System, disturbance
from scripts.benchmarks.peers.work import PeerJob, PeerWork, make_equal_work, make_model, make_once, make_work
from scripts.benchmarks.peers.worker import PEERS
from scripts.benchmarks.shapes import GRID_SHAPES

FORMATS = {"bf16": "", "int8": "int8", "int4": "int4"}
"""Formats of the weights, as `PeerJob.weights`."""

GGUF_FORMATS = {"Q8_0": "int8", "Q4_0": "int4"}
"""Those of one file that cbatch and llama.cpp read; no other system does."""

LLAMA_CPP = "llama.cpp"

SYSTEMS = [OURS, "openvino", LLAMA_CPP]

SEED = 7


class Kind(NamedTuple):
    """A kind of work. counts_prompts: whether its speed is that of all tokens, not of output tokens"""

    make: Callable[[int], PeerWork]
    max_seqs: int
    counts_prompts: bool = False


KINDS: dict[str, Kind] = {
    "one": Kind(lambda vocabulary: make_equal_work(1, 64, 256, SEED, vocabulary), 1),
    "mixed": Kind(lambda vocabulary: make_work(32, SEED, vocabulary), 32),
    "many": Kind(lambda vocabulary: make_equal_work(128, 64, 64, SEED, vocabulary), 128),
    "long": Kind(lambda vocabulary: make_equal_work(4, 6000, 32, SEED, vocabulary), 4, counts_prompts=True),
    "shared": Kind(lambda vocabulary: make_equal_work(64, 1064, 64, SEED, vocabulary, common=1000), 64),
}

MAX_BATCH_TOKENS = 512


class Cell(NamedTuple):
    """A place in the grid."""

    shape: str
    weights: str
    kind: str


class Results:
    """What has been measured, in a file.

    runs:   by cell and system, the seconds of each round
    errors: by shape, format and system, why there is nothing to measure
    floors: by cell, those of all rounds
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        content = json.loads(file.read_text()) if file.exists() else {}
        self.machine: dict[str, Any] = content.get("machine", {})
        self.versions: dict[str, dict[str, str]] = content.get("versions", {})
        self.runs: dict[str, dict[str, list[float]]] = content.get("runs", {})
        self.errors: dict[str, str] = content.get("errors", {})
        self.floors: dict[str, list[dict[str, float]]] = content.get("floors", {})

    def save(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({name: value for name, value in vars(self).items() if name[0] != "_"}, indent=1))
        part.rename(self._file)

    def seconds(self, cell: Cell, system: str) -> list[float]:
        return self.runs.get("/".join(cell), {}).get(system, [])

    def add(self, cell: Cell, system: str, seconds: float) -> None:
        self.runs.setdefault("/".join(cell), {}).setdefault(system, []).append(seconds)

    def error(self, cell: Cell, system: str) -> str:
        return self.errors.get(f"{cell.shape}/{cell.weights}/{system}", "")

    def floor(self, cell: Cell) -> dict[str, float] | None:
        """The lowest of all rounds."""
        return min(self.floors.get("/".join(cell), []), key=lambda floor: floor["seconds"], default=None)


class Grid:
    """Measures what is still missing in the results."""

    def __init__(self, options: argparse.Namespace, results: Results, report: Report) -> None:
        self._options, self._results, self._report = options, results, report
        self._interpreters = dict(options.python)
        self._work_dir = options.work_dir.absolute()

    def run(self) -> None:
        """Ctrl-C ends it early."""
        options = self._options
        try:
            for shape in options.shape:
                folder = self._work_dir / shape
                folder.mkdir(parents=True, exist_ok=True)
                make_once(folder / "model", lambda target, shape=shape: make_model(target, GRID_SHAPES[shape]))  # type: ignore[misc]
                for weights in options.weights:
                    self._measure(shape, weights)
        except KeyboardInterrupt:
            self._report.note("interrupted; this is what there is so far")

    def _measure(self, shape: str, weights: str) -> None:
        """All rounds of a model and format that are missing."""
        systems = [name for name in self._options.peers if weights in FORMATS or name in (OURS, LLAMA_CPP)]
        cells = [
            cell
            for cell in (Cell(shape, weights, kind) for kind in self._options.kind)
            if any(self._misses(cell, system) for system in systems)
        ]
        if not cells:
            return
        jobs = [self._job(cell) for cell in cells]
        self._report.note(f"{shape} {weights}: preparing")
        systems = [system for system in systems if self._prepare(cells[0], system, jobs)]
        if OURS in systems:
            self._measure_floors(cells, jobs)
        with ExitStack() as stack:
            running: dict[str, PeerProcess] = {}
            for system in systems:
                running[system] = stack.enter_context(PeerProcess(system, jobs, self._interpreters))
                if running[system].failure:
                    self._give_up(cells[0], system, running[system].failure)
            for number, cell in enumerate(cells):
                for turn in range(1, self._options.rounds + 1):
                    for system, process in running.items():
                        if self._misses(cell, system, turn):
                            self._take(cell, system, process.work(number, turn), jobs[number])
                    self._results.save()

    def _misses(self, cell: Cell, system: str, rounds: int = 0) -> bool:
        """Whether a system has not done a cell's work so often yet (0: as often as it shall) and is able to."""
        done = len(self._results.seconds(cell, system))
        return done < (rounds or self._options.rounds) and not self._results.error(cell, system)

    def _prepare(self, cell: Cell, system: str, jobs: list[PeerJob]) -> bool:
        """Has a system convert the model. Returns whether it can be measured."""
        if jobs[0].reads_gguf and system == OURS:
            call(LLAMA_CPP, "prepare", jobs[:1], self._interpreters)
        reply = call(system, "prepare", jobs[:1], self._interpreters)
        if "versions" in reply:
            self._results.versions[system] = reply["versions"]
            return True
        prepared = System(system, PEERS[system].title)
        prepared.take(reply, PEERS[system].install, [])
        self._give_up(cell, system, prepared.error)
        return False

    def _give_up(self, cell: Cell, system: str, reason: str) -> None:
        self._results.errors[f"{cell.shape}/{cell.weights}/{system}"] = reason
        self._report.note(f"  {system}: {reason}")

    def _measure_floors(self, cells: list[Cell], jobs: list[PeerJob]) -> None:
        reply = call(OURS, "floor", jobs, self._interpreters)
        for cell, floor in zip(cells, reply.get("floors", ()), strict=False):
            least = with_steps_of(floor, work_of(cell), KINDS[cell.kind].max_seqs)
            self._results.floors.setdefault("/".join(cell), []).append(least)

    def _take(self, cell: Cell, system: str, reply: dict[str, Any], job: PeerJob) -> None:
        """Keeps what came of a turn."""
        taken = System(system, PEERS[system].title)
        taken.take(reply, PEERS[system].install, job.work.lengths)
        if taken.error:
            self._give_up(cell, system, taken.error)
            return
        self._results.add(cell, system, reply["seconds"])
        speed = speed_of(cell, job.work, reply["seconds"])
        self._report.note(f"  {cell.kind}, {system}: {speed:,.1f} tokens/s")
        for line in disturbance([taken]):
            self._report.note(f"  {line}")

    def _job(self, cell: Cell) -> PeerJob:
        return PeerJob(
            str(self._work_dir / cell.shape), "bfloat16", self._options.threads, KINDS[cell.kind].max_seqs,
            MAX_BATCH_TOKENS, work_of(cell), (FORMATS | GGUF_FORMATS)[cell.weights], prefix_cache=True,
            reads_gguf=cell.weights in GGUF_FORMATS,
        )  # fmt: skip


def work_of(cell: Cell) -> PeerWork:
    return KINDS[cell.kind].make(GRID_SHAPES[cell.shape]["vocab_size"])


def with_steps_of(floor: dict[str, float], work: PeerWork, max_seqs: int) -> dict[str, float]:
    """A floor with the least steps that this work takes: those of its longest output, or with all seats taken.

    A floor has as many as a large GPU would make, however many requests there are (see `roofline_bound`). Of experts, a
    step reads those that one of its tokens takes, if tokens choose evenly.
    """
    steps = max(max(work.lengths), work.output_tokens / max_seqs)
    rows = work.output_tokens / steps
    read = 1 - floor["in_experts"] * (1 - floor["chosen"]) ** rows
    weights_s = floor["weights_s"] * read * steps / (work.output_tokens / floor["rows_per_step"])
    seconds = max(weights_s, floor["compute_s"]) + floor["cache_s"]
    return floor | {"weights_s": weights_s, "seconds": seconds, "rows_per_step": rows}


def speed_of(cell: Cell, work: PeerWork, seconds: float) -> float:
    """Tokens a second: all of them if prompts count, else those of outputs."""
    tokens = sum(work.totals) if KINDS[cell.kind].counts_prompts else work.output_tokens
    return tokens / seconds


def table(results: Results, cells: Iterator[Cell], systems: list[str]) -> list[list[str]]:
    """Head, and a line for each cell that cbatch was measured in: medians, and how many times as fast cbatch is."""
    others = [name for name in systems if name != OURS]
    lines = [
        [
            "model",
            "weights",
            "work",
            "cbatch, tokens/s",
            "of the floor",
            *(PEERS[name].title for name in others),
            "best",
        ]
    ]
    for cell in cells:
        ours = results.seconds(cell, OURS)
        if not ours:
            continue
        work, floor, times = work_of(cell), results.floor(cell), []
        line = [
            *cell,
            f"{speed_of(cell, work, median(ours)):,.0f}",
            f"{floor['seconds'] / median(ours):.0%}" if floor else "",
        ]
        for name in others:
            seconds = results.seconds(cell, name)
            if seconds:
                times.append(median(seconds) / median(ours))
                line.append(f"{speed_of(cell, work, median(seconds)):,.0f} ({times[-1]:.2f} x)")
            else:
                line.append("–")
        lines.append([*line, f"{min(times):.2f} x" if times else ""])
    return lines


def names_from(known: list[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these names."""

    def parse(text: str) -> list[str]:
        names = [part.strip() for part in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}.")
        return names

    return parse


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    formats = [*FORMATS, *GGUF_FORMATS]
    choices = {"shape": list(GRID_SHAPES), "weights": formats, "kind": list(KINDS), "peers": SYSTEMS}
    for name, known in choices.items():
        default = list(FORMATS) if name == "weights" else known
        add(f"--{name}", type=names_from(known), default=default, metavar="NAME,...", help=", ".join(known))
    add("--rounds", type=at_least_one, default=3, help="how often each system does all (3); medians count")
    add("--python", type=interpreter, action="append", default=[], metavar="NAME=PATH", help="interpreter of a system")
    add("--threads", type=at_least_one, default=default_threads(), help="threads of each system (%(default)s)")
    add("--work-dir", type=Path, default=benchmark.default_work_dir(), help="where models are kept (%(default)s)")
    add("--results", type=Path, default=Path("grid.json"), help="file that figures are added to (%(default)s)")
    add("--table", action="store_true", help="only print what has been measured")


def run(options: argparse.Namespace, report: Report) -> int:
    try:
        options.work_dir.mkdir(parents=True, exist_ok=True)
        results = Results(options.results)
        results.save()
    except (OSError, ValueError) as error:
        report.note(f"Cannot use {options.results} or {options.work_dir}: {error}.")
        return 2
    if not options.table:
        results.machine = machine_facts(options.threads)
        Grid(options, results, report).run()
    cells = (
        Cell(shape, weights, kind) for shape in options.shape for weights in options.weights for kind in options.kind
    )
    lines = table(results, cells, options.peers)
    report.table(lines)
    for place, reason in results.errors.items():
        report.line(f"{place}: {reason}")
    known = [", ".join(f"{name} {version}" for name, version in one.items()) for one in results.versions.values()]
    report.line(f"Versions: {'; '.join(known) or 'none'}. Machine: {results.machine.get('cpu')}.")
    report.figures = {name: value for name, value in vars(results).items() if name[0] != "_"}
    return 0 if len(lines) > 1 else 1
