"""The engine under load: how long the device waits for the host, and how many users it serves at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cbatch.base.config import EngineConfig
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.cli.bench.load import find_capacity
from cbatch.cli.bench.users import SLO, Figures, Scenario, run_load
from cbatch.cli.bench.workload import LengthDistribution
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.runtime.device import is_cuda
from cbatch.runtime.transfer import synchronize
from scripts.benchmarks import long_prompt
from scripts.gpu.idle import StepEvents, event_maker, gap_share
from scripts.gpu.runs import Setup
from scripts.gpu.step_trace import StepTracer, read_summary

SLO_TARGET = SLO(ttft_s=0.5, tps=50.0)
"""The promise to each user: the first token within half a second, and fifty tokens per second from then on."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the experiments are.

    rows, tokens: requests of the steady state, and the output tokens of each
    users, most:  users served at once, and the most that the search for the capacity tries
    duration_s, probe_s: seconds of the experiment with `users`, and of each probe of the search
    think_s:      mean seconds between an answer and the user's next question
    slo:          what each user is promised
    inputs, outputs: tokens of a question and of an answer
    fair:         sizes of the experiment with a long prompt beside requests that decode
    """

    rows: int
    tokens: int
    users: int
    most: int
    duration_s: float
    probe_s: float
    think_s: float
    slo: SLO
    inputs: LengthDistribution
    outputs: LengthDistribution
    fair: long_prompt.Sizes


FULL = Sizes(
    rows=256,
    tokens=400,
    users=128,
    most=1024,
    duration_s=45.0,
    probe_s=16.0,
    think_s=1.0,
    slo=SLO_TARGET,
    inputs=LengthDistribution(128, 1024, "loguniform"),
    outputs=LengthDistribution(64, 256, "uniform"),
    fair=long_prompt.Sizes(64, 256, 32768, 64, 40, 2048),
)
TINY = Sizes(
    rows=4,
    tokens=12,
    users=2,
    most=2,
    duration_s=0.8,
    probe_s=0.8,
    think_s=0.2,
    slo=SLO(ttft_s=10.0, tps=1.0),  # any machine serves this, however busy
    inputs=LengthDistribution(4, 8, "uniform"),
    outputs=LengthDistribution(4, 8, "uniform"),
    fair=long_prompt.Sizes(2, 8, 200, 8, 8, 32),
)


@dataclass(frozen=True, slots=True)
class Steady:
    """Requests that all decode.

    overlapped: whether steps overlap with the host's work
    idle_share: share of the time in which the device had nothing to do, by events around steps
    gap_share:  share of the time between the kernels of steps, by the profiler; None if it does not tell
    """

    what: str
    rows: int
    overlapped: bool
    tokens_per_s: float
    step_s: float
    idle_share: float | None
    gap_share: float | None
    error: str = ""

    def __str__(self) -> str:
        idle, gaps = ("unknown" if share is None else f"{share:.2%}" for share in (self.idle_share, self.gap_share))
        return (
            f"{self.what}: {self.tokens_per_s:,.0f} tokens/s, steps of {1e3 * self.step_s:.2f} ms, device idle {idle} "
            f"of the time between steps, gaps between the kernels of a step {gaps}{self.error and f' ({self.error})'}"
        )


@dataclass(frozen=True, slots=True)
class Served:
    """Users at once, and the share of them all of whose answers met the SLO."""

    what: str
    shape: str
    users: int
    share: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    tokens_per_s: float
    error: str

    @classmethod
    def of(cls, what: str, shape: str, users: int, figures: Figures) -> Served:
        first_s, further_s = figures["ttft_s"]["p99"], figures["tpot_s"]["p99"]
        speed, error = figures["output_tokens_per_s"], figures["first_error"]
        return cls(what, shape, users, figures["users_served_share"], first_s, further_s, speed, error)

    def __str__(self) -> str:
        share = "no user finished an answer" if self.share is None else f"{self.share:.1%} served"
        first = "?" if self.ttft_p99_s is None else f"{1e3 * self.ttft_p99_s:,.0f} ms"
        speed = "?" if not self.tpot_p99_s else f"{1 / self.tpot_p99_s:,.0f} tokens/s"
        error = f", {self.error}" if self.error else ""
        return (
            f"{self.what}, {self.users} users: {share}, first token p99 {first}, slowest 1% {speed}, "
            f"{self.tokens_per_s:,.0f} tokens/s in all{error}"
        )


TARGET_MS = 0.9e3 / SLO_TARGET.tps
"""Target of a step while users are served: a little less than what a user may wait for a token."""


def make_engine(setup: Setup, max_seqs: int, *, ahead: bool = True, target: float | None = None) -> SteppingEngine:
    """With room for at least so many requests."""
    config = EngineConfig(
        device=str(setup.device),
        max_seqs=max(setup.max_seqs, max_seqs),
        max_batch_tokens=setup.max_batch_tokens,
        run_ahead=ahead,
        target_step_ms=target,
    )
    return SteppingEngine(config, setup.loaded)


def steady(what: str, engine: SteppingEngine, sizes: Sizes) -> Steady:
    """Decodes three times: to compile the kernels, to time steps by events, and to trace some in the middle."""
    decode_all(engine, sizes)
    edge = sizes.tokens // 8
    events = StepEvents(event_maker(engine.device), skip=edge)
    with events.recorded():
        elapsed = decode_all(engine, sizes)
    synchronize(engine.device)
    idle = events.idle(last=edge)
    with tempfile.TemporaryDirectory() as folder:
        trace = StepTracer(Path(folder) / "trace.json", warmup=sizes.tokens // 2, steps=min(64, sizes.tokens // 4))
        with trace.around(engine):
            decode_all(engine, sizes)
        summary = read_summary(trace.path, on_device=is_cuda(engine.device)) if trace.is_written else None
    return Steady(
        what=what,
        rows=sizes.rows,
        overlapped=engine.config.run_ahead is True,
        tokens_per_s=sizes.rows * sizes.tokens / elapsed,
        step_s=idle.seconds / idle.num_steps if idle else 0.0,
        idle_share=idle.share if idle else None,
        gap_share=gap_share(idle, summary) if idle and summary else None,
        error=trace.error,
    )


def decode_all(engine: SteppingEngine, sizes: Sizes) -> float:
    """Seconds until all requests have all of their tokens. Raises RuntimeError if one gets fewer."""
    done: SimpleQueue[TokenEvent] = SimpleQueue()
    params = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True)
    with closing(EngineThread(engine)) as engine_thread:
        begun = time.perf_counter()
        for row in range(sizes.rows):
            prompt = [10 + (row + place) % 200 for place in range(16)]
            request = Request(prompt_ids=prompt, params=params)
            engine_thread.submit(request, lambda event: done.put(event) if event.finish_reason else None)
        reasons = {done.get().finish_reason for _ in range(sizes.rows)}
        elapsed = time.perf_counter() - begun
    if reasons != {"length"}:
        raise RuntimeError(f"Requests ended by {reasons}, not by their length.")
    return elapsed


def scenario(engine: SteppingEngine, sizes: Sizes) -> Scenario:
    """Users who wait `sizes.think_s` on average between an answer and their next question."""
    return Scenario(
        users=sizes.users,
        rate=sizes.users / (0.2 * sizes.duration_s),
        duration_s=sizes.duration_s,
        think_s=sizes.think_s,
        inputs=sizes.inputs,
        outputs=sizes.outputs,
        vocabulary=engine.model.vocab_size,
        context=engine.limits.sequence.longest,
        warmup_s=0.25 * sizes.duration_s,
    )


def load_lines(setup: Setup, sizes: Sizes) -> Iterator[Steady | Served | str]:
    """All experiments on one model."""
    name = setup.shape
    for ahead in (False, True):
        what = f"{name}, {sizes.rows} requests, {'overlapped' if ahead else 'step by step'}"
        with make_engine(setup, sizes.rows, ahead=ahead) as engine:
            yield steady(what, engine, sizes)
    for gaps in long_prompt.measure_targets(setup.loaded, sizes.fair, [None, "auto"], 1, setup.device):
        yield f"{name}, {sizes.fair.rows} requests, then {sizes.fair.prompt_tokens:,} tokens: {gaps}"
    with (
        make_engine(setup, sizes.most, target=TARGET_MS) as engine,
        closing(EngineThread(engine)) as engine_thread,
    ):
        asked = scenario(engine, sizes)
        run_load(engine_thread, asked.probe(1, min(3.0, sizes.probe_s)), sizes.slo)  # compiles the kernels
        yield Served.of(name, name, sizes.users, run_load(engine_thread, asked, sizes.slo))
        probes: dict[int, Figures] = {}

        def probe(users: int) -> Figures:
            probes[users] = run_load(engine_thread, asked.probe(users, sizes.probe_s), sizes.slo)
            return probes[users]

        found = find_capacity(probe, most=sizes.most, precision=0.1)
    for users, result in sorted(probes.items()):
        yield Served.of(f"{name}, probe", name, users, result)
    limit = ", the most that were tried" if found.is_limit else ""
    yield f"{name}: the SLO holds for {found.users} users{limit}"
