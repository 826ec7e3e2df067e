"""cbatch beside other engines on a CPU: a grid of models, weight formats and kinds of work.

    python -m scripts.benchmarks grid --python openvino=~/ov/bin/python --python llama.cpp=~/lc/bin/python
    python -m scripts.benchmarks grid --shape 135m,families --weights bf16 --kind mixed --peers cbatch,transformers

Every system gets the same random models, quantized to the same number of bits in its own way, and the same requests of
random tokens; all outputs are greedy and have a fixed length. Each system has a process of its own, which loads a model
and stays. For each kind of work, every system does a warm-up that does not count, and then the work by turns: so what
else happens on the machine disturbs all of them. Tokens differ from turn to turn.

The grid takes hours, so what is measured is added to a file (--results) after each round. The same command goes on
where the last one ended; with more --rounds it measures on. `--table` only prints what is there.

Systems: cbatch; openvino; llama.cpp; transformers-one, transformers-static and transformers-cb (or transformers for all
three), which quantize nothing. One that is not installed gets a line that says how to install it. Their packages may
not go together, so each can have an interpreter of its own (--python).

With --weights Q8_0,Q4_0,Q4_K_M, cbatch reads the file that llama.cpp has made; with f32, all is computed in float32.

Kinds of work: one (a request of 64 + 256 tokens), mixed (32 requests, prompts of 16 to 512 and outputs of 8 to 256
tokens, log-uniform), many (128 of 64 + 64), long (4 of 6,000 + 32), longest (1 of 16,000 + 32), shared (64 of 1,064 +
64, which begin with the same 1,000 tokens).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cbatch.runtime.processors import read_processors
from scripts.benchmarks.harness import Report, at_least_one, machine_facts
from scripts.benchmarks.peers.process import PeerProcess, call, disturbance, interpreter
from scripts.benchmarks.peers.work import PeerJob, PeerWork, make_equal_work, make_model, make_once, make_work
from scripts.benchmarks.peers.worker import PEERS
from scripts.benchmarks.shapes import FAMILY_SHAPES, GRID_SHAPES, PEER_SHAPES

OURS, LLAMA_CPP, TRANSFORMERS = "cbatch", "llama.cpp", "transformers"

SHAPES = PEER_SHAPES | FAMILY_SHAPES | GRID_SHAPES

FORMATS = {"bf16": "", "int8": "int8", "int4": "int4"}
"""Formats of the weights, as `PeerJob.weights`."""

GGUF_FORMATS = {"Q8_0": "int8", "Q4_0": "int4", "Q4_K_M": "Q4_K_M"}
"""Those of one file that cbatch and llama.cpp read; no other system does."""

ALL_FORMATS = FORMATS | GGUF_FORMATS | {"f32": ""}

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
    "longest": Kind(lambda vocabulary: make_equal_work(1, 16000, 32, SEED, vocabulary), 1, counts_prompts=True),
    "shared": Kind(lambda vocabulary: make_equal_work(64, 1064, 64, SEED, vocabulary, common=1000), 64),
}

MAX_BATCH_TOKENS = 512


class Cell(NamedTuple):
    """A place in the grid."""

    shape: str
    weights: str
    kind: str


class Results:
    """Measurements, kept in a file.

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

    def run(self) -> None:
        """Ctrl-C ends it early."""
        try:
            for shape in self._options.shape:
                folder = self._options.work_dir.absolute() / shape
                folder.mkdir(parents=True, exist_ok=True)
                make_once(folder / "model", partial(make_model, shape=SHAPES[shape]))
                for weights in self._options.weights:
                    self._measure(shape, weights, folder)
        except KeyboardInterrupt:
            self._report.note("interrupted; this is what there is so far")

    def _measure(self, shape: str, weights: str, folder: Path) -> None:
        """All rounds of a model and format that are missing."""
        options, results = self._options, self._results
        systems = [name for name in options.peers if can_compute(name, weights)]
        cells = [
            cell
            for cell in (Cell(shape, weights, kind) for kind in options.kind)
            if any(self._misses(cell, system, options.rounds) for system in systems)
        ]
        if not cells:
            return
        jobs = [
            PeerJob(
                str(folder), "float32" if weights == "f32" else "bfloat16", options.threads, KINDS[cell.kind].max_seqs,
                MAX_BATCH_TOKENS, work_of(cell), ALL_FORMATS[weights], prefix_cache=True,
                reads_gguf=weights in GGUF_FORMATS,
            )
            for cell in cells
        ]  # fmt: skip
        self._report.note(f"{shape} {weights}: preparing; the first time, some convert the model, which takes minutes")
        systems = [system for system in systems if self._prepare(cells[0], system, jobs)]
        if OURS in systems:
            floors = call(OURS, "floor", jobs, self._interpreters).get("floors", ())
            for cell, floor in zip(cells, floors, strict=False):
                least = with_steps_of(floor, work_of(cell), KINDS[cell.kind].max_seqs)
                results.floors.setdefault("/".join(cell), []).append(least)
        with ExitStack() as stack:
            running = {system: stack.enter_context(PeerProcess(system, jobs, self._interpreters)) for system in systems}
            for system, process in running.items():
                self._succeeds(cells[0], system, process.ask("load"))
            for number, cell in enumerate(cells):
                for turn in range(1, options.rounds + 1):
                    replies = {
                        system: self._take(cell, system, process.ask("work", number, turn))
                        for system, process in running.items()
                        if self._misses(cell, system, turn)
                    }
                    self._compare(replies)
                    results.save()

    def _misses(self, cell: Cell, system: str, rounds: int) -> bool:
        """Whether a system has not done a cell's work so often yet, and is able to."""
        return len(self._results.seconds(cell, system)) < rounds and not self._results.error(cell, system)

    def _prepare(self, cell: Cell, system: str, jobs: list[PeerJob]) -> bool:
        """Has a system convert the model. Returns whether it can be measured."""
        if jobs[0].reads_gguf and system == OURS:
            call(LLAMA_CPP, "prepare", jobs[:1], self._interpreters)
        reply = call(system, "prepare", jobs[:1], self._interpreters)
        self._results.versions |= {system: reply["versions"]} if "versions" in reply else {}
        return self._succeeds(cell, system, reply)

    def _succeeds(self, cell: Cell, system: str, reply: dict[str, Any]) -> bool:
        """Whether a reply is no error; the first error is the end of a system on this model and format."""
        if "error" in reply:
            self._results.errors[f"{cell.shape}/{cell.weights}/{system}"] = reply["error"]
            self._report.note(f"  {system}: {reply['error']}")
        return "error" not in reply

    def _take(self, cell: Cell, system: str, reply: dict[str, Any]) -> list[list[int]]:
        """Keeps what came of a turn, and returns the outputs."""
        if not self._succeeds(cell, system, reply):
            return []
        self._results.runs.setdefault("/".join(cell), {}).setdefault(system, []).append(reply["seconds"])
        steps = f" in {reply['steps']:,} steps" if reply["steps"] else ""
        speed = speed_of(cell, work_of(cell), reply["seconds"])
        self._report.note(f"  {cell.kind}, {system}: {speed:,.1f} tokens/s{steps}")
        if sentence := disturbance(reply["cores_elsewhere"]):
            self._report.note(f"  {sentence}")
        outputs: list[list[int]] = reply["outputs"]
        return outputs

    def _compare(self, outputs: dict[str, list[list[int]]]) -> None:
        """Tells how many requests begin as with cbatch."""
        ours = outputs.pop(OURS, [])
        for system, theirs in outputs.items():
            if ours and theirs:
                same = sum(one[0] == other[0] for one, other in zip(ours, theirs, strict=True))
                self._report.note(f"  {system}: {same} of {len(ours)} first tokens as cbatch")


def can_compute(system: str, weights: str) -> bool:
    """Whether a system has a format of weights."""
    if weights in GGUF_FORMATS:
        return system in (OURS, LLAMA_CPP)
    return not (system.startswith(TRANSFORMERS) and ALL_FORMATS[weights])


def work_of(cell: Cell) -> PeerWork:
    return KINDS[cell.kind].make(SHAPES[cell.shape]["vocab_size"])


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
    others = [PEERS[name].title for name in systems if name != OURS]
    lines = [["model", "weights", "work", "cbatch, tokens/s", "min – max", "of the floor", *others, "best"]]
    for cell in cells:
        ours = results.seconds(cell, OURS)
        if not ours:
            continue
        speed, floor, times = partial(speed_of, cell, work_of(cell)), results.floor(cell), []
        line = [*cell, f"{speed(median(ours)):,.0f}", f"{speed(max(ours)):,.0f} – {speed(min(ours)):,.0f}"]
        line.append(f"{floor['seconds'] / median(ours):.0%}" if floor else "")
        for name in systems:
            if seconds := results.seconds(cell, name) if name != OURS else []:
                times.append(median(seconds) / median(ours))
                line.append(f"{speed(median(seconds)):,.0f} ({times[-1]:.2f} x)")
            elif name != OURS:
                line.append("–")
        lines.append([*line, f"{min(times):.2f} x" if times else ""])
    return lines


def names_from(known: list[str], **groups: list[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these names, or names of groups of them."""

    def parse(text: str) -> list[str]:
        names = [name for part in text.split(",") for name in groups.get(part.strip(), [part.strip()])]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}.")
        return list(dict.fromkeys(names))

    return parse


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    ways = [name for name in PEERS if name.startswith(TRANSFORMERS)]
    for name, known, default, groups in (
        ("shape", list(SHAPES), list(GRID_SHAPES), {"families": list(FAMILY_SHAPES)}),
        ("weights", list(ALL_FORMATS), list(FORMATS), {}),
        ("kind", list(KINDS), list(KINDS), {}),
        ("peers", list(PEERS), [name for name in PEERS if name not in ways], {TRANSFORMERS: ways}),
    ):
        text = f"{', '.join([*known, *groups])} (default: {', '.join(default)})"
        add(f"--{name}", type=names_from(known, **groups), default=default, metavar="NAME,...", help=text)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    add("--rounds", type=at_least_one, default=3, help="how often each system does all (3); medians count")
    add("--python", type=interpreter, action="append", default=[], metavar="NAME=PATH", help="interpreter of a system")
    add(
        "--threads",
        type=at_least_one,
        default=read_processors().num_threads,
        help="threads of each system (%(default)s)",
    )
    add("--work-dir", type=Path, default=cache / "cbatch-peers", help="where models are kept (%(default)s)")
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
