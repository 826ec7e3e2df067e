"""Runs `cbatch run` on damaged models in a process with limits, and says what each run did."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.fork_server import ROOT
from tests.support.model_fuzzer.judge import MOST_SECONDS, Outcome, violations
from tests.support.model_fuzzer.kinds import AREAS, FORMATS, WholeModels, damaged_model, write_damaged

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello é \U0001f600"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user",
     "content": "hello"}]},
    {"prompt": "hello world"},
    {"prompt": " hello\n  world", "raw": True},
    {"prompt_token_ids": [5, 6, 7]},
]  # fmt: skip

_TOKENS_ONLY: list[dict[str, Any]] = [{"prompt_token_ids": [5, 6, 7]}, {"prompt": "hello"}]


class Judged(NamedTuple):
    """Outcome of a run with a damaged model, and its breaches of the rules."""

    area: str
    seed: int
    number: int
    words: str
    outcome: Outcome
    violations: list[str]


class LimitedRuns:
    """Runs the command for one damaged model after the other.

    folder:           for the models
    child_seconds: that processes for chat templates and tokenizers may take, in place of the usual limits
    """

    def __init__(self, folder: Path, child_seconds: float) -> None:
        self.folder = folder
        self.whole = WholeModels(folder / "whole")
        self.whole.folder.mkdir()
        for name, rows in (("rows", ROWS), ("tokens", _TOKENS_ONLY)):
            lines = [json.dumps({**row, "max_tokens": 3}) + "\n" for row in rows]
            (folder / f"{name}.jsonl").write_text("".join(lines))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CBATCH_DEVICE": "cpu",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.model_fuzzer.limited_process", str(child_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        self._answers = bytearray()
        self._whole_outputs: dict[str, bytes] = {}
        self._pid = 0

    def warm_up(self, areas: tuple[str, ...] = AREAS) -> None:
        """Runs whole models, so that kernels are loaded, before processes are forked."""
        for area in {"packed weights", "lora"}.intersection(areas):
            self._warm_up("plain", area)
        for base in dict.fromkeys("plain" if area not in (*FORMATS, "gguf") else area for area in areas):
            self._warm_up(base, base)
        if "config" in areas:
            for dtype in ("bfloat16", "float16"):
                self._warm_up("plain", "config", "--dtype", dtype)
        self._say({"do": "serve"})
        self._pid = self._answer()["pid"]

    def _warm_up(self, base: str, area: str, *options: str) -> None:
        order, rows = self._order(self.whole.path(base), base, area)
        order["argv"] += options
        self._say({"do": "warm up"} | order)
        answer = self._answer(600)
        outcome = _outcome(answer)
        outcome.seconds = 0.0  # kernels may have to be compiled
        assert not violations(outcome, rows) and outcome.code in (0, 1), outcome
        self._whole_outputs[area] = outcome.output

    def judge(self, area: str, seed: int, number: int) -> Judged:
        """Damages a model and runs the command with it."""
        damaged = damaged_model(self.whole, area, seed, number)
        folder = self.folder / "damaged"
        write_damaged(self.whole, damaged, folder)
        try:
            order, rows = self._order(folder, damaged.base, area)
            outcome = self._run(order)
        finally:
            shutil.rmtree(folder)
        found = violations(outcome, rows)
        if area == "packed weights" and outcome.output != self._whole_outputs[area]:
            found.append("its rows are not those of the whole model")
        return Judged(area, seed, number, damaged.words(self.whole), outcome, found)

    def _order(self, folder: Path, base: str, area: str) -> tuple[dict[str, Any], int]:
        """How the command is called, and how many rows it gets."""
        is_text = base in ("plain", "gguf")
        model = folder / "model.gguf" if base == "gguf" else folder
        argv = ["run", self.folder / ("rows.jsonl" if is_text else "tokens.jsonl"), "-m", model, "-q"]
        argv += ["--max-seqs", 4, "--kv-cache-memory", "4MiB"]
        argv += ["--lora", f"a={folder / 'adapter'}"] if area == "lora" else []
        argv += [] if area == "packed weights" else ["--no-weight-cache"]
        env = {"XDG_CACHE_HOME": str(folder / "cache")}
        return {"argv": [str(one) for one in argv], "env": env}, len(ROWS if is_text else _TOKENS_ONLY)

    def _run(self, order: dict[str, Any]) -> Outcome:
        self._say(order)
        answer = self._answer(MOST_SECONDS + 2)
        while "pid" in answer:  # the next process
            self._pid = answer["pid"]
            answer = self._answer(MOST_SECONDS + 2)
        if not answer:
            os.kill(self._pid, signal.SIGKILL)
            answer = self._answer() | {"code": None, "seconds": MOST_SECONDS}
        return _outcome(answer)

    def _say(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, timeout: float = 120) -> dict[str, Any]:
        """The next answer; empty if there is none within so many seconds."""
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self._answers:
            if not select.select([self._process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                return {}
            data = os.read(self._process.stdout.fileno(), 2**20)
            assert data, "the process that forks has died"
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


def _outcome(answer: dict[str, Any]) -> Outcome:
    output, errors = (answer[name].encode("latin-1") for name in ("output", "errors"))
    return Outcome(answer["code"], output, errors, answer["seconds"], answer.get("cpu", 0.0), answer["bytes"])


@contextmanager
def limited_runs(folder: Path, areas: tuple[str, ...] = AREAS, child_seconds: float = 0.5) -> Iterator[LimitedRuns]:
    runs = LimitedRuns(folder, child_seconds)
    try:
        runs.warm_up(areas)
        yield runs
    finally:
        runs.close()
