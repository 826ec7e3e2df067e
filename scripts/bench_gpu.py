"""Measures cbatch on this GPU, in one command: `python scripts/bench_gpu.py`. Takes less than eight minutes.

Random models of the shapes of Qwen3-0.6B and Llama-3.1-8B are made on the device, so nothing is downloaded. The script
measures the device's own rates first, as everything else is compared with them. Then it checks every kernel, and
measures attention, the work that the field shares (256 requests on the 0.6B shape), steps by their number of requests,
and whole runs beside transformers' continuous batching with the same weights.

`--load` measures the engine under load instead, on the 8B shape and in less than eight minutes too: how long the device
waits for the host in a steady state; how many users it serves at once, each with a first token within half a second and
fifty tokens per second; and what a long prompt does to the requests that decode. `--sweep` tries other settings of the
attention kernels instead, and `--only tests` runs the tests that run on a GPU. `--deterministic` measures what that
mode of the engine costs, and whether requests have the same bits alone and together.

At the end the script says which of its goals this run reaches. Everything it prints is also in a log file, and as JSON
in another, which both name the device. If a part fails, the others go on, and the exit status is 1.
`--quantize int4` or `int8` measures all of that with weights of so many bits, `--quantize fp8` with FP8 weights and a
scale for each of their rows, and `--quantize fp8 --activations fp8` with the chip's own products of FP8.
`--tiny --device cpu` tries the script itself on any machine, with Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `cbatch` and `scripts`, installed or not


class Report(logging.Handler):
    """Prints results as they come, with the warnings of the engine, and keeps them for the files.

    lines:   all results of all parts
    results: the same by part, as JSON, each with its `text`
    log:     a file for what is printed
    path:    the file that `results` are written to after each of them, as the process may be killed at any time
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.begun = time.perf_counter()
        self.lines: list[Any] = []
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []
        self.log: TextIO | None = None
        self.path: Path | None = None

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")

    def say(self, line: object) -> None:
        text = f"[{time.perf_counter() - self.begun:5.0f} s] {line}"
        print(text, flush=True)
        if self.log is not None:
            print(text, file=self.log, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"warning: {record.getMessage()}")
        self.results.setdefault("warnings", []).append(record.getMessage())

    def part(self, name: str, lines: Callable[[], Iterator[Any]]) -> None:
        """Runs one part. If it fails, the report notes that, and other parts can follow."""
        self.say(f"--- {name}")
        found = self.results.setdefault(name, [])
        try:
            for line in lines():
                self.say(line)
                self.lines.append(line)
                found.append({"text": str(line)} | asdict(line) if hasattr(line, "__dataclass_fields__") else line)
                self.save()
        except Exception as error:
            self.failed.append(name)
            found.append({"failed": f"{type(error).__name__}: {error}"})
            self.say(traceback.format_exc().rstrip())
            self.save()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cuda", help="cuda or cpu (%(default)s)")
    add("--shapes", help="which models (0.6B,8B; with --load 8B)")
    add("--load", action="store_true", help="measure the engine under load instead")
    add("--sweep", action="store_true", help="try other settings of the attention kernels instead")
    add("--deterministic", action="store_true", help="measure what that mode of the engine costs instead")
    add("--quantize", choices=("int8", "int4", "fp8"), help="keep the weights of all models in 8 or 4 bits")
    add("--activations", choices=("bf16", "fp8"), default="bf16", help="with --quantize fp8 (%(default)s)")
    add("--tiny", action="store_true", help="use small sizes, to try the script")
    add("--requests", type=int, default=512, help="requests of a whole run (%(default)s)")
    add("--peer-requests", type=int, default=128, help="requests of runs beside transformers (%(default)s)")
    add("--max-seqs", type=int, help="most requests that run at once (as an engine has it by default)")
    add("--max-batch-tokens", type=int, help="token budget of a step (as an engine has it by default)")
    for old_name, name in (("--seats", "max_seqs"), ("--budget", "max_batch_tokens")):
        add(old_name, type=int, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--only", default="", help="parts to run: the beginnings of their names, with commas; `tests` if it is named")
    add("--out", metavar="PREFIX", help="write PREFIX.log and PREFIX.json (bench_gpu-DEVICE-PARTS)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    names = (options.shapes or ("8B" if options.load else "0.6B,8B")).split(",")
    if options.device == "cpu":
        from tests.support import triton_interpreter

        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
        triton_interpreter.prepare()
    import torch

    from scripts.benchmarks.shapes import GPU_SHAPES, TINY, with_layers

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; --tiny --device cpu tries the script without one.", file=sys.stderr)
        return 2
    unknown = sorted(set(names) - GPU_SHAPES.keys())
    if unknown:
        print(f"There is no shape {unknown[0]!r}; choose from {', '.join(GPU_SHAPES)}.", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    prefix = options.out or f"bench_gpu-{slug(name)}-{slug(what_runs(options))}"
    shapes = {name: GPU_SHAPES[name] for name in names}
    if options.tiny:
        shapes = {name: with_layers(shape | TINY, 2) for name, shape in shapes.items()}
    report = Report()
    logger = logging.getLogger("cbatch")
    logger.addHandler(report)
    try:
        with Path(f"{prefix}.log").open("w") as report.log:
            report.path = Path(f"{prefix}.json")
            measure(report, shapes, device, name, options)
            report.save()
            report.say(f"done in {prefix}.log and .json; failed: {', '.join(report.failed) or 'nothing'}")
    finally:
        logger.removeHandler(report)
    return 1 if report.failed else 0


def what_runs(options: argparse.Namespace) -> str:
    special = [name for name in ("load", "sweep", "deterministic") if getattr(options, name)]
    part = options.only or next(iter(special), "plain")
    if options.quantize == "fp8":
        return f"{part}-fp8-{options.activations}"
    return f"{part}-{options.quantize}" if options.quantize else part


def slug(text: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def measure(report: Report, shapes: dict[str, Any], device: Any, name: str, options: argparse.Namespace) -> None:
    from scripts.gpu.goals import check_goals

    only = tuple(options.only.split(",")) if options.only else ()
    wanted = {
        part: lines
        for part, lines in parts_of(report, shapes, device, options).items()
        if (part.startswith(only) if only else part != "tests")
    }
    describe(report, device, name, options)
    for part, lines in wanted.items():
        report.part(part, lines)
    if not options.tiny:
        report.part("goals", lambda: check_goals(report.lines))


def describe(report: Report, device: Any, name: str, options: argparse.Namespace) -> None:
    """The machine and its rates, without which no figure means anything."""
    import platform

    import torch
    import transformers
    import triton

    from cbatch.cli.bench.roofline import measure_rates
    from cbatch.runtime.device import describe_gpus

    rates = options.rates = measure_rates(device, torch.bfloat16)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}, "
    versions += f"transformers {transformers.__version__}"
    gpus = describe_gpus()
    report.say(f"{name}; {versions}")
    for what, text in gpus.items():
        report.say(f"{what}: {text}")
    report.say(f"{rates.bytes_per_s / 1e9:,.0f} GB/s copied, {rates.flops_per_s / 1e12:,.1f} TFLOP/s")
    report.results["machine"] = {"name": name, "versions": versions, "devices": gpus, **asdict(rates)}


def parts_of(
    report: Report, shapes: dict[str, Any], device: Any, options: argparse.Namespace
) -> dict[str, Callable[[], Iterator[Any]]]:
    """Functions that measure something, by name. They run after `describe`."""
    from scripts.gpu import speed, suite

    if options.load:
        return {
            f"load {shape}": partial(load_lines, shape, config, device, options) for shape, config in shapes.items()
        }
    if options.deterministic:
        return {
            f"deterministic {shape}": partial(deterministic_lines, shape, config, device, options)
            for shape, config in shapes.items()
        }
    if options.sweep:
        return {"sweep": lambda: speed.sweep_lines(next(iter(shapes.values())), options.rates, device)}
    parts: dict[str, Callable[[], Iterator[Any]]] = {
        "tests": lambda: suite.test_lines(on_gpu=device.type == "cuda", few=options.tiny),
        "checks": lambda: check_lines(shapes, device, options),
        "attention": lambda: speed.attention_lines(shapes, options.rates, device),
    }
    if "0.6B" in shapes:
        parts["yardstick"] = lambda: yardstick_lines(shapes["0.6B"], device, options)
    for shape, config in shapes.items():
        parts[f"model {shape}"] = partial(model_lines, shape, config, device, options)
    return parts


def check_lines(shapes: dict[str, Any], device: Any, options: argparse.Namespace) -> Iterator[Any]:
    from cbatch.model.cuda import CudaModel
    from scripts.benchmarks.models import load_random
    from scripts.benchmarks.shapes import with_layers
    from scripts.gpu import checks

    failed = []
    for name, config in shapes.items():
        loaded = load_random(name, with_layers(config, 2), device, quantize=quantization(options))
        try:
            if options.activations == "fp8" and isinstance(model := loaded.fast_model, CudaModel):
                yield f"{name}: {model.float8.sentence(model.dtype)}"
            yield from checks.check_lines(name, loaded, device, options.rates)
        except RuntimeError as error:  # the other shapes follow
            failed.append(f"{name}: {error}")
    if failed:
        raise RuntimeError(" ".join(failed))


def quantization(options: argparse.Namespace) -> Any:
    from cbatch.base.quantization import STORED, Quantization

    if options.quantize == "fp8":
        return Quantization(STORED, options.activations)
    return Quantization(options.quantize) if options.quantize else None


def setup_of(name: str, config: Any, device: Any, options: argparse.Namespace) -> Any:
    from cbatch.engine.kv_cache_sizing import default_step_size
    from scripts.benchmarks.models import load_random
    from scripts.gpu.runs import Setup

    loaded = load_random(name, config, device, quantize=quantization(options))
    seqs, tokens = default_step_size(device, loaded.fast_model.weight_bytes if loaded.fast_model is not None else 0)
    return Setup(name, loaded, options.max_seqs or seqs, options.max_batch_tokens or tokens, options.rates)


def yardstick_lines(config: Any, device: Any, options: argparse.Namespace) -> Iterator[Any]:
    from scripts.gpu import runs

    yield from runs.yardstick_lines(setup_of("0.6B", config, device, options), 8 if options.tiny else 256)


def model_lines(name: str, config: Any, device: Any, options: argparse.Namespace) -> Iterator[Any]:
    """Steps and whole runs of one model."""
    import torch

    from cbatch.model.cuda import CudaModel
    from scripts.benchmarks.models import random_tensors
    from scripts.gpu import runs, speed

    setup = setup_of(name, config, device, options)
    decoder = setup.loaded.fast_model
    if not isinstance(decoder, CudaModel):  # on a CPU
        quantize, dtype = quantization(options), torch.float16 if options.quantize == "fp8" else torch.float32
        decoder = CudaModel(config, random_tensors(config, device, dtype, quantize), dtype, device, quantize=quantize)
    yield from speed.step_lines(name, decoder, options.rates)
    runs.free(device)
    requests, low, high = (8, 4, 16) if options.tiny else (options.requests, 100, 1024)
    work = runs.work_of(requests, low, high, config["vocab_size"], config["max_position_embeddings"])
    yield from runs.runs(setup, work, min(options.peer_requests, requests))


def deterministic_lines(name: str, config: Any, device: Any, options: argparse.Namespace) -> Iterator[Any]:
    """Whole runs of one model with and without `--deterministic`."""
    from scripts.gpu import deterministic, runs

    setup = setup_of(name, config, device, options)
    requests, low, high = (6, 4, 16) if options.tiny else (options.requests, 100, 1024)
    work = runs.work_of(requests, low, high, config["vocab_size"], config["max_position_embeddings"])
    yield from deterministic.deterministic_lines(setup, work, 2 if options.tiny else 16)


def load_lines(name: str, config: Any, device: Any, options: argparse.Namespace) -> Iterator[Any]:
    """One model under load."""
    from scripts.gpu import load

    setup = setup_of(name, config, device, options)
    yield from load.load_lines(setup, load.TINY if options.tiny else load.FULL)


if __name__ == "__main__":
    sys.exit(main())
