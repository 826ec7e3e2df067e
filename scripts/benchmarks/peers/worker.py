"""One piece of a comparison in a process of its own: what the benchmark runs in the interpreter of a system."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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


def prepare(peer: Peer, jobs: Sequence[PeerJob]) -> Reply:
    """Imports a system and converts the model for it. Replies `versions`, or `missing` if a package is not there."""
    try:
        modules = [importlib.import_module(name) for name in peer.packages]
        for job in jobs:
            peer.prepare(job)
    except ImportError as error:
        return {"missing": str(error)}
    versions = {module.__name__: getattr(module, "__version__", "").partition("-")[0] for module in modules}
    return {"versions": {name: version for name, version in versions.items() if version}}


def run(peer: Peer, jobs: Sequence[PeerJob]) -> Reply:
    """Does the work of the only job once, after a warm-up that does not count."""
    [job] = jobs
    with peer.open(job) as generate:
        generate(job.work.warm_up())
        return timed(generate, job.work)


def take_turns(peer: Peer, jobs: Sequence[PeerJob]) -> Iterator[Reply]:
    """Loads a model, replies that, and then does work as often as a line of stdin asks: numbers of a job and of a turn.

    A job begins with a warm-up that does not count. All jobs are for the same model, which is loaded with room for any
    of them.
    """
    largest, warm = max(jobs, key=lambda job: job.most_tokens), set()
    max_seqs, cache_tokens = max(job.max_seqs for job in jobs), max(job.needed_tokens for job in jobs)
    with peer.open(replace(largest, max_seqs=max_seqs, cache_tokens=cache_tokens)) as generate:
        yield {}
        for line in sys.stdin:
            number, turn = map(int, line.split())
            work = jobs[number].work
            if number not in warm:
                generate(work.warm_up())
                warm.add(number)
            yield timed(generate, work.turn(turn))


def timed(generate: Callable[[PeerWork], PeerResult], work: PeerWork) -> Reply:
    started = time.perf_counter()
    done = generate(work)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "outputs": done.outputs, "steps": done.steps}


def floor(peer: Peer, jobs: Sequence[PeerJob]) -> Reply:
    """What the machine could do at best, as cbatch measures it. Replies `floors`, one for each job."""
    return {"floors": cbatch_peer.measure_floors(jobs)}


TASKS: dict[str, Callable[[Peer, Sequence[PeerJob]], Reply]] = {"prepare": prepare, "run": run, "floor": floor}
TURNS = "turns"
"""The task that has many replies."""


def serve(name: str, task: str, file: Path) -> None:
    """Does a task and prints each reply as a line of JSON; never returns.

    What libraries print goes to stderr. If the task fails, the last reply is an `error`.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)

    def print_reply(reply: Reply) -> None:
        os.write(stdout, json.dumps(reply).encode() + b"\n")

    try:
        peer, jobs = PEERS[name], read_jobs(file)
        for reply in take_turns(peer, jobs) if task == TURNS else [TASKS[task](peer, jobs)]:
            print_reply(reply)
    except Exception as error:  # any error of somebody else's system is a line of the table
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print_reply({"error": f"{type(error).__name__}: {lines[0] if lines else ''}"})
    sys.stderr.flush()
    os._exit(0)  # some libraries wait for their own threads for ever


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
