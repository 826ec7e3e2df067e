"""cbatch through its Python API, and the floor of the work by its measure of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.peers.work import Done, Job, Peer, Work

if TYPE_CHECKING:
    from cbatch import Engine


def make_engine(job: Job) -> Engine:
    """On the CPU; nothing is kept of a prompt for another one."""
    import torch

    from cbatch import Engine, EngineConfig

    torch.set_num_threads(job.threads)
    return Engine(
        EngineConfig(
            model=str(job.model),
            device="cpu",
            dtype=job.dtype,
            max_seqs=job.seats,
            max_batch_tokens=job.budget,
            prefix_cache=False,
        )
    )


@contextmanager
def session(job: Job) -> Iterator[Callable[[Work], Done]]:
    from cbatch import SamplingParams

    with make_engine(job) as engine:

        def generate(work: Work) -> Done:
            before = engine.stats().num_steps
            params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in work.lengths]
            done = engine.generate(work.prompts, params)
            for completion in done:
                if completion.error is not None:
                    raise completion.error
            return Done([completion.token_ids for completion in done], engine.stats().num_steps - before)

        yield generate


def measure_floor(job: Job) -> dict[str, Any]:
    """Rates of the machine as a run has it, and the least seconds of the work by them, with their parts."""
    from cbatch.cli.bench.roofline import ROWS_PER_STEP, ModelCost, measure_rates, roofline_bound
    from cbatch.cli.bench.workload import Workload

    work = Workload(job.work.prompts, job.work.lengths, "")
    with make_engine(job) as engine:
        rates = measure_rates(engine.device, engine.model.dtype)
        parts = roofline_bound(work, ModelCost.of(engine), rates)
    return asdict(rates) | asdict(parts) | {"seconds": parts.seconds, "rows_per_step": ROWS_PER_STEP}


PEER = Peer("cbatch", ("cbatch", "torch", "transformers"), "pip install .", session)
