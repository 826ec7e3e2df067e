"""How long it takes from the command to the first token, and which parts that time has.

    python -m scripts.benchmarks startup
    python -m scripts.benchmarks startup --model FILE.gguf --python llama.cpp=PYTHON

All files have been read before. The parts run in one process, one after the other. As in the command, garbage is not
collected while modules are imported. The command is a whole `cbatch run` of one row and one token, from start to end.
Of a model whose packed weights are kept, the first start is measured as well, and how long reading the file of packed
weights takes, which bounds the second. All are measured by turns. The first build of the kernels, into an empty folder,
is measured once.

With an interpreter that has llama-cpp-python, llama.cpp loads the same GGUF file and computes one token, too.
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
from functools import partial
from pathlib import Path

from cbatch.runtime.cpu import num_threads
from scripts.benchmarks.harness import Report, at_least_one, by_turns, median_by_name
from scripts.benchmarks.peers.process import interpreter

LOAD = "load the model and its kernels"
PARTS = {
    "import torch": "import torch",
    "import the compiler of the kernels": "import numba",
    "import the engine": "from cbatch import Engine, EngineConfig, SamplingParams; Engine",
    LOAD: "gc.freeze(); gc.enable(); "
    "engine = Engine(EngineConfig(model={model!r}, quantize={quantize!r}, device='cpu'))",
    "first token": "engine.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True))",
}
_BLOCK = 2**24

_LLAMA_CPP = """
import json, sys, time
before = time.time()
import llama_cpp
import numpy as np
times = [time.time() - before]
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
settings = llama_cpp.llama_context_default_params()
settings.n_ctx, settings.n_threads = 4096, int(sys.argv[2])
context = llama_cpp.llama_init_from_model(model, settings)
times.append(time.time() - before)
batch = llama_cpp.llama_batch_init(1, 0, 1)
batch.n_tokens = batch.n_seq_id[0] = batch.logits[0] = batch.token[0] = 1
batch.pos[0] = batch.seq_id[0][0] = 0
assert llama_cpp.llama_decode(context, batch) == 0
size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, 0), shape=(size,)).argmax())
times.append(time.time() - before)
print(json.dumps(times))
"""


class Starts:
    """Starts of a model, whose packed weights are kept in a folder of their own."""

    def __init__(self, model: str | None, quantize: str | None, folder: Path) -> None:
        self.model = model
        self.quantize = quantize
        self.weights = folder / "cbatch" / "weights"
        self.environment = {"XDG_CACHE_HOME": str(folder)}

    def files(self) -> list[Path]:
        """The packed weights; none of a model that is too small for them to be kept."""
        return list(self.weights.glob("*.weights"))

    def parts(self, **environment: str) -> dict[str, float]:
        """Seconds of each part, and of Python itself around them, in one process."""
        lines = ["import gc, time; gc.disable()", "before = time.time()", "times = []"]
        for code in PARTS.values():
            lines += [code.format(model=self.model, quantize=self.quantize), "times.append(time.time() - before)"]
            lines.append("before = time.time()")
        program = "; ".join(lines) + "; import json; print(json.dumps(times))"
        start = time.time()
        run = self._run([sys.executable, "-c", program], environment)
        whole = time.time() - start
        times = json.loads(run.splitlines()[-1])
        return {"start and end of Python": whole - sum(times), **dict(zip(PARTS, times, strict=True))}

    def command(self) -> dict[str, float]:
        """Seconds of the whole command for one row and one token."""
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            rows.write_text('{"prompt_token_ids": [1]}\n')
            command = [sys.executable, "-m", "cbatch.cli.main", "run", str(rows), "--max-tokens", "1", "--ignore-eos"]
            options = {"--device": "cpu", "--model": self.model, "--quantize": self.quantize}
            given = [text for name, value in options.items() if value is not None for text in (name, value)]
            start = time.time()
            self._run([*command, *given], {})
            return {"`cbatch run`, one row and one token": time.time() - start}

    def first(self) -> dict[str, float]:
        """Seconds of loading when nothing is packed yet."""
        for path in self.files():
            path.unlink()
        return {"first start: load, pack and keep the weights": self.parts()[LOAD]}

    def read(self) -> dict[str, float]:
        """Seconds of reading the packed weights, on one thread."""
        start = time.time()
        for path in self.files():
            with path.open("rb", buffering=0) as file:
                memory = bytearray(_BLOCK)
                while file.readinto(memory):
                    pass
        return {"read the packed weights": time.time() - start}

    def llama_cpp(self, python: str) -> dict[str, float]:
        """Seconds of its parts, in one process, and of the whole process."""
        assert self.model is not None
        start = time.time()
        run = self._run([python, "-c", _LLAMA_CPP, self.model, str(num_threads())], {})
        whole = time.time() - start
        imports, loaded, token = json.loads(run.splitlines()[-1])
        parts = {"import": imports, "load": loaded - imports, "first token": token - loaded, "whole process": whole}
        return {f"llama.cpp: {name}": seconds for name, seconds in parts.items()}

    def _run(self, command: list[str], environment: dict[str, str]) -> str:
        variables = os.environ | self.environment | environment
        return subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model folder (the bundled demo model)")
    parser.add_argument("--quantize", help="quantization of its weights (none)")
    parser.add_argument(
        "--python", type=interpreter, action="append", default=[], metavar="NAME=PATH", help="interpreter of llama.cpp"
    )
    parser.add_argument("--rounds", type=at_least_one, default=7, help="medians are printed (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(options.model, options.quantize, Path(folder))
        starts.parts()  # compiles and packs, and brings the files into memory
        ways: dict[str, Callable[[], dict[str, float]]] = {"parts": starts.parts, "command": starts.command}
        for name, python in options.python:
            ways[name] = partial(starts.llama_cpp, python)
        if starts.files():
            ways |= {"first": starts.first, "read": starts.read}
        rounds = by_turns(ways, options.rounds)
        seconds = {name: value for way in ways for name, value in median_by_name(rounds[way]).items()}
        with tempfile.TemporaryDirectory() as empty:
            seconds["first build of the kernels"] = starts.parts(NUMBA_CACHE_DIR=empty)[LOAD] - seconds[LOAD]
    rows = [[name, f"{value:.2f}"] for name, value in seconds.items()]
    report.table([["part", f"seconds, median of {options.rounds}"], *rows])
    report.figures |= {"rounds": options.rounds, "seconds": seconds}
    return 0
