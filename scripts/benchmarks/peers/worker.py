"""A system in a process of its own: what the benchmark runs in the interpreter of that system.

Each line of stdin is a task: `prepare`, `floor`, `load`, or after that `work JOB TURN`; each gets a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.peers import cbatch_peer, llama_cpp_peer, openvino_peer, transformers_peer
from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork, read_jobs

PEERS: dict[str, Peer] = {
    "cbatch": cbatch_peer.PEER,
    **transformers_peer.PEERS,
    "openvino": openvino_peer.PEER,
    "llama.cpp": llama_cpp_peer.PEER,
}

Reply = dict[str, Any]


class Worker:
    """Does the tasks of one system. All jobs are for the same model, which is loaded with room for any of them."""

    def __init__(self, peer: Peer, jobs: Sequence[PeerJob]) -> None:
        self.peer, self.jobs = peer, jobs
        self._loaded = ExitStack()
        self._generate: Callable[[PeerWork], PeerResult]
        self._warm: set[int] = set()
        self.tasks: dict[str, Callable[..., Reply]] = {
            "prepare": self.prepare, "floor": self.floor, "load": self.load, "work": self.work,
        }  # fmt: skip

    def prepare(self) -> Reply:
        """Imports the system and converts the model. Replies `versions`, or `missing` if a package is not there."""
        try:
            modules = [importlib.import_module(name) for name in self.peer.packages]
            self.peer.prepare(self.jobs[0])
        except ImportError as error:
            return {"missing": str(error)}
        versions = {module.__name__: getattr(module, "__version__", "").partition("-")[0] for module in modules}
        return {"versions": {name: version for name, version in versions.items() if version}}

    def floor(self) -> Reply:
        """The best the machine could do, as cbatch measures it. Replies `floors`, one for each job."""
        return {"floors": cbatch_peer.measure_floors(self.jobs)}

    def load(self) -> Reply:
        largest = max(self.jobs, key=lambda job: job.most_tokens)
        max_seqs, tokens = max(job.max_seqs for job in self.jobs), max(job.needed_tokens for job in self.jobs)
        self._generate = self._loaded.enter_context(
            self.peer.open(replace(largest, max_seqs=max_seqs, cache_tokens=tokens))
        )
        return {}

    def work(self, job: str, turn: str) -> Reply:
        """Replies `seconds`, `outputs` and `steps`. A job begins with a warm-up that does not count."""
        work = self.jobs[int(job)].work
        if int(job) not in self._warm:
            self._generate(work.warm_up())
            self._warm.add(int(job))
        work = work.turn(int(turn))
        started = time.perf_counter()
        done = self._generate(work)
        return {"seconds": time.perf_counter() - started, "outputs": done.outputs, "steps": done.steps}


def serve(name: str, file: Path) -> None:
    """Prints a reply to each task until stdin ends or a task fails, which replies an `error`; never returns.

    What libraries print goes to stderr.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)

    def print_reply(reply: Reply) -> None:
        os.write(stdout, json.dumps(reply).encode() + b"\n")

    try:
        worker = Worker(PEERS[name], read_jobs(file))
        for line in sys.stdin:
            task, *arguments = line.split()
            print_reply(worker.tasks[task](*arguments))
    except Exception as error:  # any error of somebody else's system is a line of the table
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print_reply({"error": f"{type(error).__name__}: {lines[0] if lines else ''}"})
    sys.stderr.flush()
    os._exit(0)  # some libraries wait for their own threads for ever


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
