"""cbatch through its Python API, and the floor of the work on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork

if TYPE_CHECKING:
    from cbatch import Engine


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

    Quantized weights are multiplied at the rate of int8 products.
    """
    from cbatch.cli.bench.roofline import ROWS_PER_STEP, ModelCost, measure_rates, roofline_bound
    from cbatch.cli.bench.workload import Workload

    with make_engine(jobs[0]) as engine:
        rates, cost = measure_rates(engine.device, engine.model.dtype), ModelCost.of(engine)
        in_experts, chosen = expert_shares(getattr(engine.model, "program", None))
    if jobs[0].weights:
        rates = replace(rates, flops_per_s=measure_int8_rate())
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


def expert_shares(program: Any) -> tuple[float, float]:
    """Shares: of a model's matrices those that belong to experts, and of a layer's experts those that a token takes."""
    from cbatch.model.ops.all import Experts, Linear, Route

    if program is None:  # the layers of transformers
        return 0.0, 1.0
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


def measure_int8_rate() -> float:
    """Operations a second of a product of int8 matrices, which torch adds up in int32."""
    import torch

    from cbatch.cli.bench.roofline import best_time

    size = 1024
    left, right = (torch.randint(-127, 128, (size, size), dtype=torch.int8) for _ in range(2))
    seconds = best_time(lambda: torch._int_mm(left, right), torch.device("cpu"), repeats=1)
    return 2 * size**3 / seconds


PEER = Peer("cbatch", ("cbatch", "torch", "transformers"), "pip install .", session)
