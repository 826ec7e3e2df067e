"""cbatch through its Python API, and the floor of the work on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork

if TYPE_CHECKING:
    from cbatch import Engine


def make_engine(job: PeerJob) -> Engine:
    """An engine on the CPU, without a prefix cache."""
    import torch

    from cbatch import Engine, EngineConfig

    torch.set_num_threads(job.threads)
    return Engine(
        EngineConfig(
            model=str(job.model),
            device="cpu",
            dtype=job.dtype,
            max_seqs=job.max_seqs,
            max_batch_tokens=job.max_batch_tokens,
            prefix_cache=False,
        )
    )


@contextmanager
def session(job: PeerJob) -> Iterator[Callable[[PeerWork], PeerResult]]:
    from cbatch import SamplingParams

    with make_engine(job) as engine:

        def generate(work: PeerWork) -> PeerResult:
            before = engine.stats().num_steps
            params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in work.lengths]
            done = engine.generate(work.prompts, params)
            for completion in done:
                if completion.error is not None:
                    raise completion.error
            return PeerResult([list(completion.token_ids) for completion in done], engine.stats().num_steps - before)

        yield generate


def measure_floor(job: PeerJob) -> dict[str, Any]:
    """The rates of the machine, and the least seconds that the work can take with them, by its parts."""
    from cbatch.cli.bench.roofline import ROWS_PER_STEP, ModelCost, measure_rates, roofline_bound
    from cbatch.cli.bench.workload import Workload

    work = Workload(job.work.prompts, job.work.lengths, "")
    with make_engine(job) as engine:
        rates = measure_rates(engine.device, engine.model.dtype)
        parts = roofline_bound(work, ModelCost.of(engine), rates)
    return asdict(rates) | asdict(parts) | {"seconds": parts.seconds, "rows_per_step": ROWS_PER_STEP}


PEER = Peer("cbatch", ("cbatch", "torch", "transformers"), "pip install .", session)
