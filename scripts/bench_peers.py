"""cbatch beside the engines that people would otherwise run on a CPU: the same model, the same work, in turns.

    python scripts/bench_peers.py --python openvino=~/ov/bin/python --python llama.cpp=~/lc/bin/python

The model is a Llama of 135 million parameters with random weights, made once. The work is greedy and has no end token:
all requests are there at the start, prompts have 16 to 512 tokens and outputs 8 to 256, log-uniform. In each round each
system has a process of its own, which loads, does a little that does not count, then does the whole work once. Nothing
else should run on the machine meanwhile; where something did, the report says so.

Systems: cbatch; transformers-one, transformers-static, transformers-cb (or transformers for all three); openvino;
llama.cpp. What is not installed gets a line that says how to install it. As packages of several systems may not go
together, each can live in an interpreter of its own (--python). The one that runs this script needs what cbatch needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers.table import OURS, System, disturbance, in_columns, table
from peers.work import SHAPES, Job, make_model, make_once, make_work
from peers.worker import PEERS, serve

SEATS, BUDGET = 32, 512
LIMIT_S = 3600
"""Seconds that one system may take for one task."""

Interpreters = dict[str, str]


def call(name: str, task: str, job: Job, interpreters: Interpreters) -> dict[str, Any]:
    """Has a task done in the interpreter of a system, and returns its reply; `trouble` where there is none."""
    python = interpreters.get(name) or interpreters.get(name.partition("-")[0]) or sys.executable
    file, log = Path(job.folder) / "job.json", Path(job.folder) / f"{name}-{task}.log"
    job.write(file)
    threads = str(job.threads)
    settings = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--serve", name, task, str(file)]
    before, started = cpu_seconds(), time.perf_counter()
    try:
        with log.open("wb") as errors:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, env=os.environ | settings, timeout=LIMIT_S
            )
    except OSError as error:
        return {"trouble": f"{python} cannot be run: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"trouble": f"it took more than {LIMIT_S // 60} minutes; see {log}"}
    if not done.stdout:
        return {"trouble": f"its process ended with code {done.returncode}; see {log}"}
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply | {"cores_elsewhere": (cpu_seconds() - before) / (time.perf_counter() - started)}


def cpu_seconds() -> float:
    """Seconds that cores have been busy with what is not ours, be it in this machine or, as it says, in its host."""
    import psutil

    spent, own = psutil.cpu_times(), os.times()
    waiting = spent.idle + getattr(spent, "iowait", 0.0)
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)
    return sum(spent) - waiting - counted_twice - sum(own[:4])


def measure(names: list[str], rounds: int, job: Job, interpreters: Interpreters) -> tuple[list[System], dict[str, Any]]:
    """All rounds. Returns the systems, and the floor that was lowest of all rounds; Ctrl-C ends them early."""
    systems = [System(name, PEERS[name].title) for name in names]
    floors: list[dict[str, Any]] = []
    try:
        say("preparing; the first time, some convert the model, which takes minutes")
        for system in systems:
            have(system, "prepare", job, interpreters)
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            floors.append(call(OURS, "floor", job, interpreters))
            for system in systems:
                if not system.trouble:
                    have(system, "run", job, interpreters)
    except KeyboardInterrupt:
        say("interrupted; this is what there is so far")
    return systems, min(floors, key=lambda floor: floor.get("seconds", float("inf")), default={})


def have(system: System, task: str, job: Job, interpreters: Interpreters) -> None:
    """Has a system do a task, and says what came of it."""
    system.take(call(system.name, task, job, interpreters), PEERS[system.name].install, job.work.lengths)
    done = "ready" if task == "prepare" else f"{system.speeds[-1]:,.1f} output tokens/s" if system.runs else ""
    say(f"  {system.title}: {system.trouble or done}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine_facts(threads: int) -> dict[str, Any]:
    """What the work runs on."""
    import psutil

    name = platform.processor() or platform.machine()
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
    return {"cpu": name, "cores": psutil.cpu_count(logical=False) or os.cpu_count(), "threads": threads}


def default_threads() -> int:
    """One for each core that this process may use, however many it can do at once."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def describe(job: Job, shape: str, facts: dict[str, Any], floor: dict[str, Any]) -> dict[str, str]:
    """What was done on what, and how the floor is computed."""
    work, config = job.work, job.model_config
    size = f"{config['num_hidden_layers']} layers of {config['hidden_size']}, vocabulary {config['vocab_size']:,}"
    tokens = f"{work.prompt_tokens:,} prompt tokens, {work.output_tokens:,} output tokens"
    limits = f"at most {job.seats} requests and {job.budget} tokens in a step"
    lines = {
        "machine": f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads for each system",
        "model": f"random Llama, {shape} ({size}), computed in {job.dtype}",
        "work": f"{len(work.prompts)} requests at once: {tokens}; {limits}",
    }
    if "seconds" not in floor:
        return lines | {"floor": f"not measured: {floor.get('trouble', 'interrupted')}"}
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


def report(lines: dict[str, str], systems: list[System], floor: float | None, markdown: bool) -> list[str]:
    """All that is printed at the end."""
    width = max(map(len, lines)) + 2
    head = [f"- {name.strip()}: {text}" if markdown else f"{name:{width}}{text}" for name, text in lines.items()]
    known = [", ".join(f"{name} {version}" for name, version in system.versions.items()) for system in systems]
    versions = "; ".join(dict.fromkeys(filter(None, known)))
    notes = [f"Versions: {versions or 'none'}", *disturbance(systems)]
    return [*head, "", *in_columns(table(systems, floor), markdown), "", *notes]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbatch-peers"
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="how often each system runs (3); medians count")
    add("--peers", type=peer_names, default=list(PEERS), metavar="NAME,...", help="systems to run (all)")
    add(
        "--python",
        type=interpreter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter of a system, where its packages are not in this one; can be repeated",
    )
    add("--requests", type=positive, default=32, help="number of requests (32)")
    add("--seed", type=int, default=7, help="of the requests (7)")
    add("--shape", choices=SHAPES, default="135m", help="size of the model (135m); tiny only shows that all is set up")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="what is computed in (bfloat16)")
    add("--threads", type=positive, default=default_threads(), help="of each system (%(default)s, one for each core)")
    add("--work-dir", type=Path, default=cache, help="where models are kept (%(default)s); the first run takes minutes")
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--markdown", action="store_true", help="print the report as Markdown")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on.")
    return int(text)


def peer_names(text: str) -> list[str]:
    """Names of systems; one word for all of transformers."""
    names = [name for part in text.split(",") for name in PEERS if part.strip() in (name, name.partition("-")[0])]
    unknown = [part for part in text.split(",") if part.strip() not in {*PEERS, "transformers"}]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no system {unknown[0]!r}; there are {', '.join(PEERS)}.")
    return list(dict.fromkeys(names))


def interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in {*PEERS, "transformers"} or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with one of {', '.join(PEERS)}, transformers.")
    return name, str(Path(path).expanduser())


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder, shape = options.work_dir.absolute() / options.shape, SHAPES[options.shape]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if options.json is not None:
            options.json.touch()  # better to fail now than after all rounds
    except OSError as error:
        say(f"Cannot write {error.filename}: {error.strerror}.")
        return 2
    say(f"models are in {folder}")
    make_once(folder / "model", lambda target: make_model(target, shape))
    work = make_work(options.requests, options.seed, shape["vocab_size"])
    job = Job(str(folder), options.dtype, options.threads, SEATS, BUDGET, work)
    systems, floor = measure(options.peers, options.rounds, job, dict(options.python))
    facts = machine_facts(options.threads)
    best = work.output_tokens / floor["seconds"] if "seconds" in floor else None
    print("\n".join(report(describe(job, options.shape, facts, floor), systems, best, options.markdown)))
    if options.json is not None:
        asked = vars(options) | {"prompt_tokens": work.prompt_tokens, "output_tokens": work.output_tokens}
        figures = {"machine": facts, "work": asked, "floor": floor, "systems": list(map(vars, systems))}
        options.json.write_text(json.dumps(figures, indent=1, default=str) + "\n")
    return 0 if any(system.speed is not None for system in systems) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:  # this is the process of one system
        name, task, file = sys.argv[2:]
        serve(name, task, Path(file))
    sys.exit(main())
