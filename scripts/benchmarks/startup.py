"""How long it takes from the command to the first token, and which parts that time has.

    python -m scripts.benchmarks startup

All files have been read before. The parts run in one process, one after the other; the command is a whole `cbatch run`
of one row and one token, from start to end. Both are measured by turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.benchmarks.harness import Report, at_least_one, by_turns, median_by_name

PARTS = {
    "import torch": "import torch",
    "import the compiler of the kernels": "import numba",
    "import the engine": "from cbatch.engine import Engine, EngineConfig, SamplingParams; Engine",
    "load the model and its kernels": "engine = Engine(EngineConfig(model={model!r}, device='cpu'))",
    "first token": "engine.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True))",
}


def time_parts(model: str | None) -> dict[str, float]:
    """Seconds of each part, and of Python itself around them, in one process."""
    lines = ["import time", "before = time.time()", "times = []"]
    for code in PARTS.values():
        lines += [code.format(model=model), "times.append(time.time() - before)", "before = time.time()"]
    program = "; ".join(lines) + "; import json; print(json.dumps(times))"
    start = time.time()
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    whole = time.time() - start
    times = json.loads(run.stdout.splitlines()[-1])
    return {"start and end of Python": whole - sum(times), **dict(zip(PARTS, times, strict=True))}


def time_command(model: str | None) -> dict[str, float]:
    """Seconds of the whole command for one row and one token."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text('{"prompt": "Hello"}\n')
        command = [sys.executable, "-m", "cbatch.cli.main", "run", str(rows), "--max-tokens", "1", "--device", "cpu"]
        start = time.time()
        subprocess.run(command + (["--model", model] if model else []), capture_output=True, check=True)
        return {"`cbatch run`, one row and one token": time.time() - start}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model folder (the bundled demo model)")
    parser.add_argument("--rounds", type=at_least_one, default=7, help="medians are printed (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    time_command(options.model)  # compiles, and brings the files into memory
    ways = {"parts": lambda: time_parts(options.model), "command": lambda: time_command(options.model)}
    rounds = by_turns(ways, options.rounds)
    seconds = {name: value for way in ways for name, value in median_by_name(rounds[way]).items()}
    rows = [[name, f"{value:.2f}"] for name, value in seconds.items()]
    report.table([["part", f"seconds, median of {options.rounds}"], *rows])
    report.figures |= {"rounds": options.rounds, "seconds": seconds}
    return 0
