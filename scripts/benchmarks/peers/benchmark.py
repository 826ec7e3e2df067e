"""cbatch beside the engines that people would otherwise run on a CPU: the same model, the same work, by turns.

    python -m scripts.benchmarks peers --python openvino=~/ov/bin/python --python llama.cpp=~/lc/bin/python

The model is a Llama of 135 million parameters with random weights, made once; `--shape` has models of other families,
and `--shape phi3,gemma3` runs several, with a table of all of them at the end. The work is greedy and has no end token:
all requests are there at the start, prompts have 16 to 512 tokens and outputs 8 to 256, log-uniform. In each round each
system has a process of its own, which loads, does a little that does not count, then does the whole work once. Nothing
else should run on the machine meanwhile; if something does, the report says so.

Systems: cbatch; transformers-one, transformers-static, transformers-cb (or transformers for all three); openvino;
llama.cpp. A system that is not installed gets a line that says how to install it. Packages of several systems may not
go together, so each system can have an interpreter of its own (--python). This benchmark itself needs what cbatch
needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks.harness import ROOT, Report, at_least_one, cpu_seconds_elsewhere
from scripts.benchmarks.peers.table import OURS, System, disturbance, summary, table
from scripts.benchmarks.peers.work import PeerJob, make_model, make_once, make_work, write_jobs
from scripts.benchmarks.peers.worker import PEERS, TURNS
from scripts.benchmarks.shapes import FAMILY_SHAPES, PEER_SHAPES

MAX_SEQS, MAX_BATCH_TOKENS = 32, 512
LIMIT_S = 3600
"""Seconds that one system may take for one task."""

ALL_SHAPES = PEER_SHAPES | FAMILY_SHAPES

Interpreters = dict[str, str]


class _Invocation(NamedTuple):
    """How a task is started in the interpreter of a system. log: what it writes to stderr"""

    command: list[str]
    env: dict[str, str]
    log: Path

    @classmethod
    def of(cls, name: str, task: str, jobs: Sequence[PeerJob], interpreters: Interpreters) -> _Invocation:
        """jobs: for the same model"""
        python = interpreters.get(name) or interpreters.get(name.partition("-")[0]) or sys.executable
        file, log = (Path(jobs[0].folder) / f"{name}-{task}{ending}" for ending in (".json", ".log"))
        write_jobs(file, jobs)
        threads = str(jobs[0].threads)
        settings = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        return cls([python, "-m", "scripts.benchmarks.peers.worker", name, task, str(file)], os.environ | settings, log)


def call(name: str, task: str, jobs: Sequence[PeerJob], interpreters: Interpreters) -> dict[str, Any]:
    """Has a task done in the interpreter of a system. Returns its reply, which is an `error` if it gave none.

    jobs: for the same model
    """
    command, env, log = _Invocation.of(name, task, jobs, interpreters)
    before, started = cpu_seconds_elsewhere(), time.perf_counter()
    try:
        with log.open("wb") as errors:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, env=env, timeout=LIMIT_S, cwd=ROOT)
    except OSError as error:
        return {"error": f"{command[0]} cannot be run: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {LIMIT_S // 60} minutes; see {log}"}
    if not done.stdout:
        return {"error": f"its process ended with code {done.returncode}; see {log}"}
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply | {"cores_elsewhere": (cpu_seconds_elsewhere() - before) / (time.perf_counter() - started)}


class PeerProcess:
    """A system in a process of its own, which loads its model and then works as often as it is asked to."""

    def __init__(self, name: str, jobs: Sequence[PeerJob], interpreters: Interpreters) -> None:
        """jobs: for the same model"""
        command, env, self._log = _Invocation.of(name, TURNS, jobs, interpreters)
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=ROOT, text=True
            )
        self.failure = self._reply().get("error", "")
        """Why it could not load the model; empty if it has."""

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def work(self, job: int, turn: int) -> dict[str, Any]:
        """What came of the work of a job; an `error` if nothing did."""
        before, started = self._cpu_seconds_elsewhere(), time.perf_counter()
        with suppress(OSError):  # if it has ended, there is no reply
            print(job, turn, file=self._process.stdin, flush=True)
        reply = self._reply()
        if "error" in reply:
            return reply
        elsewhere = (self._cpu_seconds_elsewhere() - before) / (time.perf_counter() - started)
        return reply | {"cores_elsewhere": elsewhere}

    def _cpu_seconds_elsewhere(self) -> float:
        import psutil

        return cpu_seconds_elsewhere() - sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def _reply(self) -> dict[str, Any]:
        """The next one; an error if there is none within the limit."""
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        return {"error": f"its process ended with code {self._process.wait()}; see {self._log}"}


class Comparison:
    """All rounds of all systems; Ctrl-C ends them early."""

    def __init__(self, names: list[str], job: PeerJob, interpreters: Interpreters, report: Report) -> None:
        self.systems = [System(name, PEERS[name].title) for name in names]
        self.floors: list[dict[str, Any]] = []
        self._job, self._interpreters, self._report = job, interpreters, report

    @property
    def floor(self) -> dict[str, Any]:
        """The lowest of all rounds."""
        return min(self.floors, key=lambda floor: floor.get("seconds", float("inf")), default={})

    def run(self, rounds: int) -> None:
        note = self._report.note
        try:
            note("preparing; the first time, some convert the model, which takes minutes")
            for system in self.systems:
                self._do(system, "prepare")
            for number in range(1, rounds + 1):
                note(f"round {number} of {rounds}")
                reply = call(OURS, "floor", [self._job], self._interpreters)
                self.floors += reply.get("floors", [reply])
                for system in self.systems:
                    if not system.error:
                        self._do(system, "run")
        except KeyboardInterrupt:
            note("interrupted; this is what there is so far")

    def _do(self, system: System, task: str) -> None:
        """Has a system do a task, and says what came of it."""
        reply = call(system.name, task, [self._job], self._interpreters)
        system.take(reply, PEERS[system.name].install, self._job.work.lengths)
        done = "ready" if task == "prepare" else f"{system.speeds[-1]:,.1f} output tokens/s" if system.runs else ""
        self._report.note(f"  {system.title}: {system.error or done}")


def machine_facts(threads: int) -> dict[str, Any]:
    """What the work runs on."""
    import psutil

    from cbatch.cli.bench.results import processor

    return {"cpu": processor(), "cores": psutil.cpu_count(logical=False) or os.cpu_count(), "threads": threads}


def default_threads() -> int:
    """One for each physical core that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def describe(job: PeerJob, shape: str, facts: dict[str, Any], floor: dict[str, Any]) -> dict[str, str]:
    """What was done on what, and how the floor is computed."""
    work, config = job.work, job.model_config
    size = f"{config['num_hidden_layers']} layers of {config['hidden_size']}, vocabulary {config['vocab_size']:,}"
    tokens = f"{work.prompt_tokens:,} prompt tokens, {work.output_tokens:,} output tokens"
    limits = f"at most {job.max_seqs} requests and {job.max_batch_tokens} tokens in a step"
    lines = {
        "machine": f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads for each system",
        "model": f"random weights, {shape} ({config['model_type']}; {size}), computed in {job.dtype}",
        "work": f"{len(work.prompts)} requests at once: {tokens}; {limits}",
    }
    if "seconds" not in floor:
        return lines | {"floor": f"not measured: {floor.get('error', 'interrupted')}"}
    rates = f"{floor['flops_per_s'] / 1e12:.2f} TFLOP/s (matrix product in {job.dtype}), "
    rates += f"{floor['bytes_per_s'] / 1e9:.1f} GB/s (copy)"
    weights, products, context = (f"{floor[part]:.3g} s" for part in ("weights_s", "compute_s", "cache_s"))
    return lines | {
        "measured": rates,
        "floor": f"max(weights {weights}, products {products}) + context {context} = {floor['seconds']:.3g} s",
        "  weights": f"output tokens / {floor['rows_per_step']} × bytes of all matrices / bandwidth",
        "  products": "2 × parameters × tokens / matrix rate",
        "  context": "bytes of the keys and values that each output token reads / bandwidth",
    }


def default_work_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbatch-peers"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=at_least_one, default=3, help="how often each system runs (3); medians count")
    add("--peers", type=peer_names, default=list(PEERS), metavar="NAME,...", help="systems to run (all)")
    add(
        "--python",
        type=interpreter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter of a system whose packages are not in this one; can be repeated",
    )
    add("--requests", type=at_least_one, default=32, help="number of requests (32)")
    add("--seed", type=int, default=7, help="seed of the requests (7)")
    shapes = f"the model (135m), or several: {', '.join(ALL_SHAPES)}; tiny only shows that all is set up"
    add("--shape", "--model", type=shape_names, default=["135m"], metavar="NAME,...", help=shapes)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the computation (bfloat16)",
    )
    threads = "threads of each system (%(default)s, one for each core)"
    add("--threads", type=at_least_one, default=default_threads(), help=threads)
    add(
        "--work-dir",
        type=Path,
        default=default_work_dir(),
        help="where models are kept (%(default)s); the first run takes minutes",
    )


def peer_names(text: str) -> list[str]:
    """Names of systems; `transformers` means all three of them."""
    names = [name for part in text.split(",") for name in PEERS if part.strip() in (name, name.partition("-")[0])]
    unknown = [part for part in text.split(",") if part.strip() not in {*PEERS, "transformers"}]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no system {unknown[0]!r}; there are {', '.join(PEERS)}.")
    return list(dict.fromkeys(names))


def shape_names(text: str) -> list[str]:
    """Names of models; `families` means all that are no Llamas."""
    names = [name for part in text.split(",") for name in (FAMILY_SHAPES if part == "families" else [part.strip()])]
    unknown = [name for name in names if name not in ALL_SHAPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no model {unknown[0]!r}; there are {', '.join(ALL_SHAPES)}.")
    return list(dict.fromkeys(names))


def interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in {*PEERS, "transformers"} or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with one of {', '.join(PEERS)}, transformers.")
    return name, str(Path(path).expanduser().absolute())


def run(options: argparse.Namespace, report: Report) -> int:
    compared: dict[str, list[System]] = {}
    for name in options.shape:
        folder = options.work_dir.absolute() / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            report.note(f"Cannot write {error.filename}: {error.strerror}.")
            return 2
        report.note(f"models are in {folder}")
        compared[name] = compare(name, folder, options, report)
        report.line()
    if len(compared) > 1:
        report.table(summary(compared), notes=True)
    return 0 if any(system.speed is not None for systems in compared.values() for system in systems) else 1


def compare(name: str, folder: Path, options: argparse.Namespace, report: Report) -> list[System]:
    """Runs all systems on one model, and reports what came of it."""
    shape = ALL_SHAPES[name]
    make_once(folder / "model", lambda target: make_model(target, shape))
    work = make_work(options.requests, options.seed, shape["vocab_size"])
    job = PeerJob(str(folder), options.dtype, options.threads, MAX_SEQS, MAX_BATCH_TOKENS, work)
    comparison = Comparison(options.peers, job, dict(options.python), report)
    comparison.run(options.rounds)
    systems, floor, facts = comparison.systems, comparison.floor, machine_facts(options.threads)
    report.facts(describe(job, name, facts, floor))
    report.line()
    report.table(table(systems, work.output_tokens / floor["seconds"] if "seconds" in floor else None), notes=True)
    report.line()
    known = [", ".join(f"{name} {version}" for name, version in system.versions.items()) for system in systems]
    report.line(f"Versions: {'; '.join(dict.fromkeys(filter(None, known))) or 'none'}")
    for line in disturbance(systems):
        report.line(line)
    asked = vars(options) | {"prompt_tokens": work.prompt_tokens, "output_tokens": work.output_tokens, "shape": name}
    figures = {"machine": facts, "work": asked, "floor": floor, "systems": list(map(vars, systems))}
    if len(options.shape) > 1:
        figures = {"models": report.figures.get("models", {}) | {name: figures}}
    report.figures |= figures
    return systems
