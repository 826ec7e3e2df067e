"""How long it takes from the command to the first token, and what of it: with files that the system has read before.

The parts are taken in processes of their own, one after the other in each; the command is a whole `cbatch run` of one
row and one token, from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = {
    "import torch": "import torch",
    "import the compiler of the kernels": "import numba",
    "import the engine": "from cbatch.engine import Engine, EngineConfig, SamplingParams; Engine",
    "load the model and its kernels": "engine = Engine(EngineConfig(model={model!r}, device='cpu'))",
    "first token": "engine.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True))",
}


def time_parts(model: str | None) -> dict[str, float]:
    """Seconds of each part, and of Python itself before them, in one process."""
    lines = ["import time", "before = time.time()", "times = []"]
    for code in PARTS.values():
        lines += [code.format(model=model), "times.append(time.time() - before)", "before = time.time()"]
    program = "; ".join(lines) + "; import json; print(json.dumps(times))"
    start = time.time()
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    whole = time.time() - start
    times = json.loads(run.stdout.splitlines()[-1])
    return {"start and end of Python": whole - sum(times), **dict(zip(PARTS, times, strict=True))}


def time_command(model: str | None) -> float:
    """Seconds of the whole command for one row and one token."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text('{"prompt": "Hello"}\n')
        command = [sys.executable, "-m", "cbatch.cli.main", "run", str(rows), "--max-tokens", "1", "--device", "cpu"]
        start = time.time()
        subprocess.run(command + (["--model", model] if model else []), capture_output=True, check=True)
        return time.time() - start


def main() -> None:
    """Measure by turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; the bundled demo model where nothing is given")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    time_command(args.model)  # compiles, and brings the files into memory
    parts: list[dict[str, float]] = []
    commands: list[float] = []
    for _ in range(args.rounds):
        parts.append(time_parts(args.model))
        commands.append(time_command(args.model))
    print(f"| part | seconds, median of {args.rounds} |\n| --- | ---: |")
    for name in parts[0]:
        print(f"| {name} | {statistics.median(one[name] for one in parts):.2f} |")
    print(f"| `cbatch run`, one row and one token | {statistics.median(commands):.2f} |")


if __name__ == "__main__":
    main()
