"""One piece of a comparison in a process of its own: what the benchmark runs in the interpreter of a system."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.benchmarks.peers import cbatch_peer, llama_cpp_peer, openvino_peer, transformers_peer
from scripts.benchmarks.peers.work import Job, Peer

PEERS: dict[str, Peer] = {
    "cbatch": cbatch_peer.PEER,
    **transformers_peer.PEERS,
    "openvino": openvino_peer.PEER,
    "llama.cpp": llama_cpp_peer.PEER,
}

Reply = dict[str, Any]


def prepare(peer: Peer, job: Job) -> Reply:
    """Imports a system and converts the model for it. `versions`, or `missing` where something is not installed."""
    try:
        modules = [importlib.import_module(name) for name in peer.packages]
        peer.prepare(job)
    except ImportError as error:
        return {"missing": str(error)}
    versions = {module.__name__: getattr(module, "__version__", "").partition("-")[0] for module in modules}
    return {"versions": {name: version for name, version in versions.items() if version}}


def run(peer: Peer, job: Job) -> Reply:
    """The whole work once, after a little of it that does not count."""
    with peer.open(job) as generate:
        generate(job.work.warm_up())
        started = time.perf_counter()
        done = generate(job.work)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "outputs": done.outputs, "steps": done.steps}


def floor(peer: Peer, job: Job) -> Reply:
    """What the machine could do; by cbatch, whoever the peer is."""
    return cbatch_peer.measure_floor(job)


TASKS: dict[str, Callable[[Peer, Job], Reply]] = {"prepare": prepare, "run": run, "floor": floor}


def serve(name: str, task: str, file: Path) -> None:
    """Does a task and prints one line of JSON; never returns.

    Whatever libraries print goes to stderr. What goes wrong is the `error` of the reply.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        reply = TASKS[task](PEERS[name], Job.read(file))
    except Exception as error:  # any error of somebody else's system is a line of the table
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reply = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    os.write(stdout, json.dumps(reply).encode() + b"\n")
    sys.stderr.flush()
    os._exit(0)  # some libraries wait for their own threads for ever


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
