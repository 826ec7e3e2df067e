"""cbatch through its Python API, and the floor of the work on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork

if TYPE_CHECKING:
    from cbatch import Engine
    from cbatch.model.ops.program import Program


def make_engine(job: PeerJob) -> Engine:
    """An engine on the CPU. It drafts nothing: random weights repeat themselves more than those of a real model do."""
    from cbatch import Engine, EngineConfig

    return Engine(
        EngineConfig(
            model=str(job.gguf if job.reads_gguf else job.model),
            device="cpu",
            threads=job.threads,
            dtype=job.dtype,
            quantize=(job.weights or None) if not job.reads_gguf else None,
            max_seqs=job.max_seqs,
            max_batch_tokens=job.max_batch_tokens,
            kv_cache_memory=f"{job.cache_gib}GiB",
            speculate="off",
            prefix_cache=job.prefix_cache,
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


def measure_floors(jobs: Sequence[PeerJob]) -> list[dict[str, Any]]:
    """The rates of the machine, and the least seconds that the work of each job can take with them, by its parts.

    Memory is read at its bandwidth, and products take what their instruction takes on registers (see `products`).
    """
    from cbatch.cli.bench.roofline import ROWS_PER_STEP, ModelCost, roofline_bound
    from cbatch.cli.bench.workload import Workload
    from scripts.benchmarks.products import device_rates

    with make_engine(jobs[0]) as engine:
        model: Any = engine.model  # of the grid's shapes all have a program
        rates, cost = device_rates(model.formats, model.left_bytes), ModelCost.of(engine)
        in_experts, chosen = expert_shares(model.program)
    floors = []
    for job in jobs:
        work = job.work
        parts = roofline_bound(work.as_workload, cost, rates)
        if job.prefix_cache:
            computed = roofline_bound(Workload(work.distinct_prompts, work.lengths, ""), cost, rates)
            parts = replace(parts, compute_s=computed.compute_s)
        facts = {"rows_per_step": ROWS_PER_STEP, "in_experts": in_experts, "chosen": chosen}
        floors.append(asdict(rates) | asdict(parts) | {"seconds": parts.seconds, **facts})
    return floors


def expert_shares(program: Program) -> tuple[float, float]:
    """Shares: of a model's matrices those that belong to experts, and of a layer's experts those that a token takes."""
    from cbatch.model.ops.all import Experts, Linear, Route

    in_experts, others, top_k, chosen = 0, program.head.size, 0, 1.0
    for operation in program.operations:
        match operation:
            case Linear():
                others += operation.matrix.size
            case Route():
                others += operation.matrix.size
                top_k = operation.top_k
            case Experts():
                in_experts += sum(matrix.size for matrix in (*operation.up, *operation.down))
                chosen = top_k / len(operation.up)
    return in_experts / (in_experts + others), chosen


PEER = Peer("cbatch", ("cbatch", "torch", "transformers"), "pip install .", session)
