"""How long quantized models take to load, and how much memory, in each format.

    python -m scripts.benchmarks loading
    python -m scripts.benchmarks loading --formats awq,fp8 --model FILE.gguf

Each start is a process of its own, which loads a model and generates one token: the first start packs the weights and
keeps them, the second maps them, and the one without a cache packs them into its own memory. Memory is the peak while
the model is loaded, beyond what the process had before, read every 2 ms: anonymous pages, and those of mapped files,
which the system can take back. Models are random, in a real shape; files are in memory when they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.benchmarks.harness import Report
from scripts.benchmarks.models import RandomTensors
from scripts.benchmarks.shapes import ALL_SHAPES, GRID_SHAPES, Config
from scripts.benchmarks.startup import Starts

_SHAPES = ALL_SHAPES | GRID_SHAPES
_GROUP = 128
_SECONDS_BETWEEN_SAMPLES = 0.002

_PROGRAM = """
import json, sys, time
from cbatch import Engine, EngineConfig, SamplingParams
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", kv_blocks=8, weight_cache=sys.argv[2] == "kept"))
engine.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True))
print(json.dumps(time.perf_counter() - start), flush=True)
sys.stdin.readline()
"""

Tensors = dict[str, Tensor]


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _awq(rows: int, depth: int) -> Tensors:
    groups = -(-depth // _GROUP)
    return {
        ".qweight": _words(depth, rows // 8),
        ".qzeros": _words(groups, rows // 8),
        ".scales": torch.full((groups, rows), 0.01, dtype=torch.float16),
    }


def _gptq(rows: int, depth: int, *, act_order: bool = False) -> Tensors:
    groups = -(-depth // _GROUP)
    order = torch.randperm(depth) if act_order else torch.arange(depth)
    return {
        ".qweight": _words(depth // 8, rows),
        ".qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        ".scales": torch.full((groups, rows), 0.01, dtype=torch.float16),
        ".g_idx": (order // _GROUP).to(torch.int32),
    }


def _w4a16(rows: int, depth: int) -> Tensors:
    return {
        ".weight_packed": _words(rows, depth // 8),
        ".weight_scale": torch.full((rows, -(-depth // _GROUP)), 0.01, dtype=torch.bfloat16),
        ".weight_shape": torch.tensor([rows, depth]),
    }


def _w8a8(rows: int, depth: int) -> Tensors:
    return {
        ".weight": torch.randint(-127, 128, (rows, depth), dtype=torch.int8),
        ".weight_scale": torch.full((rows, 1), 0.001, dtype=torch.bfloat16),
    }


def _fp8(rows: int, depth: int) -> Tensors:
    return {
        ".weight": torch.randint(0, 0x60, (rows, depth), dtype=torch.uint8).view(torch.float8_e4m3fn),
        ".weight_scale_inv": torch.full((-(-rows // 128), -(-depth // 128)), 0.001),
    }


def _mxfp4(experts: int, depth: int, rows: int) -> Tensors:
    return {
        "_blocks": torch.randint(0, 256, (experts, rows, depth // 32, 16), dtype=torch.uint8),
        "_scales": torch.full((experts, rows, depth // 32), 120, dtype=torch.uint8),
    }


@dataclass(frozen=True)
class Format:
    """How a checkpoint is written. dims: of the tensors that are quantized, whose names end with `_proj`"""

    settings: dict[str, Any]
    encode: Callable[..., Tensors]
    dims: int = 2
    shape: str = "qwen3-0.6b"


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP}
_SCHEME = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True}, _awq),
    "gptq": Format(_GPTQ, _gptq),
    "gptq act-order": Format(_GPTQ | {"desc_act": True}, lambda *sizes: _gptq(*sizes, act_order=True)),
    "w4a16": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"0": {"weights": _SCHEME}},
        },
        _w4a16,
    ),
    "w8a8": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
        },
        _w8a8,
    ),
    "fp8": Format({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8),
    "mxfp4": Format({"quant_method": "mxfp4"}, _mxfp4, 3, "gpt-oss"),
}


@dataclass(frozen=True)
class Start:
    """seconds: to the first token; anonymous, mapped: bytes at the peak beyond those before loading"""

    seconds: float
    anonymous: int
    mapped: int


def write_model(folder: Path, config: Config, format: Format) -> None:
    """A random checkpoint of a shape."""
    from transformers import AutoConfig

    folder.mkdir()
    config = {"model_type": "llama", **config}
    given = {key: value for key, value in config.items() if key != "model_type"}
    config = AutoConfig.for_model(config["model_type"], **given).to_dict() | config  # which has only some keys
    tensors = RandomTensors(config, torch.device("cpu"), torch.bfloat16)
    stored: Tensors = {}
    for name, shape in tensors.shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and len(shape) == format.dims:
            stored |= {module + end: part for end, part in format.encode(*shape).items()}
        elif not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            stored[name] = tensors[name]
    written = config | {"quantization_config": format.settings, "eos_token_id": 0, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def start_of(model: Path, caches: Path, *, is_kept: bool) -> Start:
    """Loads a model in a process of its own, and watches its memory."""
    command = [sys.executable, "-c", _PROGRAM, str(model), "kept" if is_kept else "not kept"]
    variables = os.environ | {"XDG_CACHE_HOME": str(caches)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as child:
        assert child.stdin is not None and child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"{model} could not be loaded")
        before = peak = _resident(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        while not (line := child.stdout.readline()) and child.poll() is None:
            now = _resident(child.pid)
            peak = max(peak[0], now[0]), max(peak[1], now[1])
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
        if not line:
            raise RuntimeError(f"{model} could not be loaded")
        child.stdin.write("\n")
    return Start(json.loads(line), peak[0] - before[0], peak[1] - before[1])


def _resident(process: int) -> tuple[int, int]:
    """Bytes of anonymous pages, and of those of files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
             if name.startswith("Rss")}  # fmt: skip
    return sizes.get("RssAnon", 0), sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=sorted(_SHAPES), help="of the models (that of Qwen3-0.6B; a small GPT-OSS for mxfp4)"
    )
    parser.add_argument("--formats", default=",".join(FORMATS), help="that models are made in (%(default)s)")
    parser.add_argument("--model", action="append", default=[], help="a folder or GGUF file that is measured as well")


def run(options: argparse.Namespace, report: Report) -> int:
    rows = [["format", "files", "packed", "start", "seconds", "anonymous", "mapped"]]
    report.figures["formats"] = figures = {}
    with tempfile.TemporaryDirectory() as made:
        sources: dict[str, Path] = {Path(name).name: Path(name).resolve() for name in options.model}
        for name in filter(None, options.formats.split(",")):
            format = FORMATS[name]
            sources[name] = Path(made) / name.replace(" ", "-")
            shape = format.shape if format.dims == 3 else options.shape or format.shape
            write_model(sources[name], _SHAPES[shape], format)
        for name, model in sources.items():
            with tempfile.TemporaryDirectory() as caches:
                found = measure(model, Path(caches))
            figures[name] = {key: asdict(value) if isinstance(value, Start) else value for key, value in found.items()}
            for start in ("first", "second", "not kept"):
                one = found[start]
                sizes = [_mib(found["files"]), _mib(found["packed"])] if start == "first" else ["", ""]
                rows.append(
                    [name if start == "first" else "", *sizes, start, f"{one.seconds:.1f}", _mib(one.anonymous),
                     _mib(one.mapped)]
                )  # fmt: skip
            rows.append(["", "", "", "read the packed file", f"{found['read']:.1f}", "", ""])
    report.table(rows)
    report.line("Sizes are in MiB.")
    return 0


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def measure(model: Path, caches: Path) -> dict[str, Any]:
    starts = Starts(str(model), None, caches)
    start_of(model, caches / "other", is_kept=True)  # compiles kernels, and brings the files into memory
    first = start_of(model, caches, is_kept=True)
    packed = sum(path.stat().st_size for path in starts.files())
    second = start_of(model, caches, is_kept=True)
    read = sum(starts.read().values())
    files = [model] if model.is_file() else list(model.glob("*.safetensors"))
    return {
        "files": sum(path.stat().st_size for path in files),
        "packed": packed,
        "first": first,
        "second": second,
        "not kept": start_of(model, caches, is_kept=False),
        "read": read,
    }
