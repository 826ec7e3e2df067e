"""Ways of transformers itself: `generate` on one request or on padded batches, and its continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork

STATIC_ROWS = 8


@contextmanager
def session(job: PeerJob, way: str, slots: int = 0) -> Iterator[Callable[[PeerWork], PeerResult]]:
    """Loads the model for one of the ways of `cbatch bench`.  slots: requests at once; 0: as many as the job says"""
    import torch
    from transformers import AutoModelForCausalLM

    from cbatch.cli.bench.peers import PEERS, PeerSetup

    torch.set_num_threads(job.threads)
    network = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    work = job.work.as_workload
    setup = PeerSetup(network.eval().requires_grad_(False), work, slots or job.max_seqs, job.max_batch_tokens)
    with PEERS[way](setup) as generate:

        def run(work: PeerWork) -> PeerResult:
            batches = [work.lengths[first : first + slots] for first in range(0, len(work.lengths), slots or 1)]
            return PeerResult(generate(work.as_workload), sum(map(max, batches)) if slots else None)

        yield run


def _peer(what: str, way: str, slots: int = 0) -> Peer:
    packages, install = ("transformers", "torch"), "pip install torch transformers accelerate"
    return Peer(f"transformers, {what}", packages, install, partial(session, way=way, slots=slots))


PEERS = {
    "transformers-one": _peer("one by one", "transformers-generate", 1),
    "transformers-static": _peer(f"static batches of {STATIC_ROWS}", "transformers-generate", STATIC_ROWS),
    "transformers-cb": _peer("continuous batching", "transformers-cb"),
}
