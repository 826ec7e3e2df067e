"""What cbatch does on this GPU, in one command: `python scripts/bench_gpu.py`. Takes less than eight minutes.

Random models of the shapes of Qwen3-0.6B and Llama-3.1-8B are made on the device, so nothing is downloaded. The script
measures the device's own rates first, as everything else is compared with them. Then it checks every kernel, and
measures attention, steps by their number of requests, and whole runs beside transformers' continuous batching with the
same weights.

`--load` measures the engine under load instead, on the 8B shape and in less than eight minutes too: how long the device
waits for the host in a steady state; how many users it serves at once, each with a first token within half a second and
fifty tokens per second; and what a long prompt does to the requests that decode.

If a part fails, the others go on, and the exit status is 1. `--tiny --device cpu` tries the script itself on any
machine, with Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `cbatch` and `scripts`, installed or not


class Report:
    """Prints results as they come, and keeps them for the JSON file."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def say(self, line: object) -> None:
        print(f"[{time.perf_counter() - self.begun:5.0f} s] {line}", flush=True)

    def part(self, name: str, lines: Callable[[], Iterator[Any]]) -> None:
        """Runs one part. If it fails, the report notes that, and other parts can follow."""
        self.say(f"--- {name}")
        found = self.results.setdefault(name, [])
        try:
            for line in lines():
                self.say(line)
                found.append(asdict(line) if hasattr(line, "__dataclass_fields__") else line)
        except Exception:
            self.failed.append(name)
            traceback.print_exc()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cuda", help="cuda or cpu (%(default)s)")
    add("--shapes", help="which models (0.6B,8B; with --load 8B)")
    add("--load", action="store_true", help="measure the engine under load instead")
    add("--tiny", action="store_true", help="use small sizes, to try the script")
    add("--requests", type=int, default=512, help="requests of a whole run (%(default)s)")
    add(
        "--peer-requests",
        type=int,
        default=128,
        help="requests of runs beside transformers (%(default)s)",
    )
    add("--max-seqs", type=int, default=512, help="most requests that run at once (%(default)s)")
    add("--max-batch-tokens", type=int, default=4096, help="token budget of a step (%(default)s)")
    for old_name, name in (("--seats", "max_seqs"), ("--budget", "max_batch_tokens")):
        add(old_name, type=int, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--sweep", action="store_true", help="try other settings of the attention kernels too, which takes minutes")
    add("--only", default="", help="parts to run: the beginnings of their names, with commas between them")
    add("--json", type=Path, help="write the results to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    names = (options.shapes or ("8B" if options.load else "0.6B,8B")).split(",")
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    import torch

    from scripts.benchmarks.shapes import GPU_SHAPES, TINY

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; --tiny --device cpu tries the script without one.", file=sys.stderr)
        return 2
    unknown = sorted(set(names) - GPU_SHAPES.keys())
    if unknown:
        print(f"There is no shape {unknown[0]!r}; choose from {', '.join(GPU_SHAPES)}.", file=sys.stderr)
        return 2
    report = Report()
    shapes = {name: GPU_SHAPES[name] | (TINY if options.tiny else {}) for name in names}
    measure(report, shapes, device, options)
    if options.json:
        options.json.write_text(json.dumps(report.results, indent=1) + "\n")
    report.say(f"done; failed: {', '.join(report.failed) or 'nothing'}")
    return 1 if report.failed else 0


def measure(report: Report, shapes: dict[str, Any], device: Any, options: argparse.Namespace) -> None:
    import torch
    import triton

    from cbatch.cli.bench.roofline import measure_rates
    from scripts.gpu import checks, speed

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    dtype = torch.bfloat16
    rates = measure_rates(device, dtype)
    machine = f"{name}, torch {torch.__version__}, Triton {triton.__version__}"
    report.say(f"{machine}: {rates.bytes_per_s / 1e9:,.0f} GB/s copied, {rates.flops_per_s / 1e12:,.1f} TFLOP/s")
    report.results["machine"] = {"name": machine, **asdict(rates)}

    def check() -> Iterator[Any]:
        wrong = []
        for what, is_right, figure in checks.check_all(shapes, device):
            yield f"{'right' if is_right else 'WRONG'}: {what} ({figure})"
            wrong += [] if is_right else [what]
        if wrong:
            raise AssertionError(f"{len(wrong)} checks failed, such as {wrong[0]}")

    only = tuple(options.only.split(",")) if options.only else ("",)
    parts: dict[str, Callable[[], Iterator[Any]]] = {}
    if not options.load:
        parts |= {"checks": check, "attention": lambda: speed.attention_lines(shapes, rates, device)}
    if options.sweep:
        parts["sweep"] = lambda: speed.sweep_lines(next(iter(shapes.values())), rates, device)
    for shape, config in shapes.items():
        if options.load:
            parts[f"load {shape}"] = partial(load_lines, shape, config, device, options)
        else:
            parts[f"model {shape}"] = partial(model_lines, shape, config, rates, device, options)
    for part, lines in parts.items():
        if part.startswith(only):
            report.part(part, lines)


def model_lines(name: str, config: Any, rates: Any, device: Any, options: argparse.Namespace) -> Iterator[Any]:
    """Steps and whole runs of one model."""
    import torch

    from cbatch.engine.models.cuda import CudaModel
    from scripts.benchmarks.models import RandomTensors, load_random
    from scripts.gpu import runs, speed

    loaded = load_random(name, config, device, fast_path=device.type == "cuda")
    decoder = loaded.fast_model
    if not isinstance(decoder, CudaModel):  # on a CPU
        tensors = RandomTensors(config, device, torch.float32)
        decoder = CudaModel(config, tensors, torch.float32, device)
    yield from speed.step_lines(name, decoder, rates)
    runs.free(device)
    requests, low, high = (8, 4, 16) if options.tiny else (options.requests, 100, 1024)
    work = runs.work_of(requests, low, high, config["vocab_size"], config["max_position_embeddings"])
    peer_rows = min(options.peer_requests, requests)
    yield from runs.runs(name, loaded, work, peer_rows, options.max_seqs, options.max_batch_tokens, rates)


def load_lines(name: str, config: Any, device: Any, options: argparse.Namespace) -> Iterator[Any]:
    """One model under load."""
    from scripts.benchmarks.models import load_random
    from scripts.gpu import load

    sizes = load.TINY if options.tiny else load.FULL
    loaded = load_random(name, config, device, fast_path=device.type == "cuda")
    yield from load.load_lines(name, loaded, device, options.max_seqs, options.max_batch_tokens, sizes)


if __name__ == "__main__":
    sys.exit(main())
