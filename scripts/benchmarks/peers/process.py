"""Systems in processes of their own, each with the interpreter that has its packages."""

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
from typing import Any

import psutil

from scripts.benchmarks.harness import ROOT, cpu_seconds_elsewhere
from scripts.benchmarks.peers.work import PeerJob, write_jobs
from scripts.benchmarks.peers.worker import PEERS

LIMIT_S = 3600
"""Seconds that one system may take for one task."""

DISTURBED = 0.1
"""Cores that other processes may use before a run counts as disturbed."""

Interpreters = dict[str, str]


class PeerProcess:
    """A system in a process of its own, which does a task as often as it is asked to (see `worker.py`)."""

    def __init__(self, name: str, jobs: Sequence[PeerJob], interpreters: Interpreters) -> None:
        """jobs: for the same model"""
        python = interpreters.get(name) or interpreters.get(name.partition("-")[0]) or sys.executable
        file, self._log = (Path(jobs[0].folder) / f"{name}{ending}" for ending in (".json", ".log"))
        write_jobs(file, jobs)
        threads = str(jobs[0].threads)
        env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self._name, self._error, self._jobs = name, "", jobs
        command = [python, "-m", "scripts.benchmarks.peers.worker", name, str(file)]
        try:
            with self._log.open("wb") as errors:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=ROOT, text=True
                )
        except OSError as error:
            self._error = f"{python} cannot be run: {error.strerror}"

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._error:
            self._process.kill()
            self._process.communicate()

    def ask(self, *task: object) -> dict[str, Any]:
        """The reply to a task; an `error` if there is none, it failed, or a request got too few tokens."""
        if self._error:
            return {"error": f"failed: {self._error}"}
        before, started = self._cpu_seconds_elsewhere(), time.perf_counter()
        with suppress(OSError):  # if it has ended, there is no reply
            print(*task, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            return {"error": f"failed: its process ended with code {self._process.wait()}; see {self._log}"}
        reply: dict[str, Any] = json.loads(line)
        if error := self._error_of(reply, task):
            return {"error": error}
        return reply | {"cores_elsewhere": (self._cpu_seconds_elsewhere() - before) / (time.perf_counter() - started)}

    def _error_of(self, reply: dict[str, Any], task: Sequence[object]) -> str:
        if "missing" in reply:
            return f"not installed ({reply['missing'].rstrip('.')}): {PEERS[self._name].install}"
        if "error" in reply:
            return f"failed: {reply['error']}"
        if "outputs" in reply:
            lengths = self._jobs[int(str(task[1]))].work.lengths
            for number, (tokens, wanted) in enumerate(zip(reply["outputs"], lengths, strict=True), 1):
                if len(tokens) != wanted:
                    return f"not comparable: request {number} got {len(tokens):,} of {wanted:,} tokens"
        return ""

    def _cpu_seconds_elsewhere(self) -> float:
        return cpu_seconds_elsewhere() - sum(psutil.Process(self._process.pid).cpu_times()[:2])


def call(name: str, task: str, jobs: Sequence[PeerJob], interpreters: Interpreters) -> dict[str, Any]:
    """The reply to one task, by a process that does nothing else."""
    with PeerProcess(name, jobs, interpreters) as process:
        return process.ask(task)


def disturbance(cores: float) -> str:
    """A sentence on how many cores others used meanwhile, if a run was not alone on the machine."""
    return f"Disturbed: something else took {cores:.1f} cores." if cores > DISTURBED else ""


def interpreter(text: str) -> tuple[str, str]:
    """The type of an option NAME=PATH."""
    name, _, path = text.partition("=")
    if name not in {*PEERS, "transformers"} or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with one of {', '.join(PEERS)}, transformers.")
    return name, str(Path(path).expanduser().absolute())
