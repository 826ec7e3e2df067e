"""Figures of runs, and the report of them, which `to_json` turns into the object that `--json` prints."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from cbatch import __version__
from cbatch.api import Engine
from cbatch.cli.bench.gain import Gain
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.peers import PeerMetrics
from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord
from cbatch.cli.bench.roofline import DeviceRates, RooflineBound
from cbatch.cli.bench.techniques import Techniques
from cbatch.cli.bench.workload import Outputs, Workload
from cbatch.cli.common.percentiles import Percentiles
from cbatch.cli.run.stats import ReplicaFigures


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the versions of what runs on it, named as in `--json`."""

    device: str
    threads: int
    system: str
    cbatch: str
    python: str
    torch: str
    transformers: str

    @classmethod
    def of(cls, engine: Engine) -> Machine:
        module = torch.get_device_module(engine.device)
        device = module.get_device_name(engine.device) if hasattr(module, "get_device_name") else processor()
        return cls(
            device=device,
            threads=torch.get_num_threads(),
            system=platform.platform(),
            cbatch=__version__,
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
        )


def describe_model(engine: Engine) -> str:
    shown = engine.core.describe()
    parameters = shown["parameters"].replace(" million", " million parameters", 1)
    return f"{shown['model']}, {parameters}, {shown['dtype']}, attention {shown['attention']}"


def processor() -> str:
    """The name of the processor, if the system tells it."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(\S.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of one run, named as in `--json`: times in seconds, shares in 0..1, memory in bytes.

    padded_token_share:  share of padding among the tokens of padded prompts
    wasted_output_share: share of the output tokens that nobody wanted
    idle_slot_share:     share of slots, over all steps, that were empty or computed nothing useful
    drafted_tokens:      tokens that were computed because they might come next; those of them that did are accepted
    """

    elapsed_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    padded_token_share: float
    wasted_output_share: float
    idle_slot_share: float
    steps: int
    tokens_computed: int
    tokens_per_step: float
    slots_in_use: float
    cache_use_mean: float
    cache_use_peak: float
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    model_s: float
    outside_model_share: float
    peak_memory_bytes: int | None


def run_metrics(record: RunRecord, work: Workload) -> RunMetrics:
    elapsed = max(record.elapsed_s, 1e-9)
    first = [request.first for request in record.requests if request.first is not None]
    per_token = [
        (request.last - request.first) / (request.wanted - 1)
        for request in record.requests
        if request.first is not None and request.last is not None and request.wanted > 1
    ]
    model_s = sum(step.model_s for step in record.steps)
    step_s = sum(step.end - step.start for step in record.steps)
    num_steps = max(len(record.steps), 1)
    padding, generated = record.tokens("padding"), sum(len(request.tokens) for request in record.requests)
    computed, slot_steps = record.tokens(*TOKEN_KINDS), sum(step.useful_slots for step in record.steps)
    blocks_used = [step.blocks_used for step in record.steps]
    return RunMetrics(
        elapsed_s=record.elapsed_s,
        output_tokens_per_s=work.output_tokens / elapsed,
        total_tokens_per_s=(work.prompt_tokens + work.output_tokens) / elapsed,
        ttft_s=Percentiles.of(first),
        tpot_s=Percentiles.of(per_token),
        padded_token_share=padding / max(record.tokens("prefill", "padding"), 1),
        wasted_output_share=(generated - work.output_tokens) / max(generated, 1),
        idle_slot_share=1 - slot_steps / max(record.slots * len(record.steps), 1),
        steps=len(record.steps),
        tokens_computed=computed,
        tokens_per_step=computed / num_steps,
        slots_in_use=slot_steps / num_steps,
        cache_use_mean=sum(blocks_used) / num_steps / record.num_blocks,
        cache_use_peak=max(blocks_used, default=0) / record.num_blocks,
        preemptions=record.preemptions,
        drafted_tokens=record.drafted,
        accepted_tokens=record.accepted,
        model_s=model_s,
        outside_model_share=1 - model_s / step_s if step_s else 0.0,
        peak_memory_bytes=record.peak_bytes,
    )


@dataclass(frozen=True, slots=True)
class TokenPosition:
    """A token of the outputs. `row` is the index of the request, `token` that of the token in its output."""

    row: int
    token: int


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """How far the outputs of two runs agree, named as in `--json`."""

    equal_rows_share: float
    first_difference: TokenPosition | None


def compare_outputs(outputs: Outputs, reference: Outputs) -> OutputDifference:
    unequal = [n for n, (here, there) in enumerate(zip(outputs, reference, strict=True)) if here != there]
    share = 1 - len(unequal) / max(len(outputs), 1)
    if not unequal:
        return OutputDifference(share, None)
    here, there = outputs[unequal[0]], reference[unequal[0]]
    shorter = min(len(here), len(there))
    token = next((n for n in range(shorter) if here[n] != there[n]), shorter)
    return OutputDifference(share, TokenPosition(unequal[0], token))


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """Figures of a run on replicas, named as in `--json`.

    replicas: what each of them did, as in the statistics of `cbatch run`
    """

    elapsed_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    steps: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    replicas: list[ReplicaFigures]


Metrics = RunMetrics | PeerMetrics | ReplicaMetrics


class MeasuredRun(NamedTuple):
    """One run of the work. record: its steps, if they are known"""

    outputs: Outputs
    metrics: Metrics
    record: RunRecord | None = None


def median_run(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    """The run with the median time; of two in the middle, the faster one."""
    return sorted(runs, key=lambda run: run.metrics.elapsed_s)[(len(runs) - 1) // 2]


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """The median run of one strategy or peer, or of replicas.

    name:                what `--strategies`, `--ablate` or `--peer` call it, or `replicas`
    floor_share:         speed as a share of what the roofline allows
    elapsed_s_of_rounds: seconds of every round
    difference:          from the outputs of the reference run
    """

    name: str
    title: str
    metrics: Metrics
    floor_share: float
    elapsed_s_of_rounds: list[float]
    difference: OutputDifference

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "title": self.title,
            **asdict(self.metrics),
            "floor_share": self.floor_share,
            "elapsed_s_of_rounds": self.elapsed_s_of_rounds,
            **asdict(self.difference),
        }


@dataclass(frozen=True, slots=True)
class FailedPeer:
    """A peer that did not get through; `error` says why in a sentence."""

    name: str
    error: str

    def to_json(self) -> dict[str, Any]:
        return {"strategy": self.name, "title": self.name, "error": self.error}


AnyResult = StrategyResult | FailedPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """Strategies and peers on the same work.

    records: the median run of each strategy, by its title
    assumed: sentences about what the model did not tell, for the roofline
    """

    options: BenchOptions
    machine: Machine
    model: str
    work: Workload
    strategies: list[AnyResult]
    records: dict[str, RunRecord]
    rates: DeviceRates
    bound: RooflineBound
    assumed: Sequence[str]
    techniques: Techniques

    @property
    def done(self) -> list[StrategyResult]:
        """All but the peers that failed."""
        return [result for result in self.strategies if isinstance(result, StrategyResult)]

    @property
    def gain(self) -> Gain | None:
        """The gain of continuous batching over static batches, if both were run."""
        static, continuous = self.records.get("static batches"), self.records.get("continuous")
        return Gain.of(static, continuous, self.work) if static and continuous else None

    def to_json(self) -> dict[str, Any]:
        work, techniques = self.work, self.techniques.to_json()
        data: dict[str, Any] = {
            "machine": asdict(self.machine),
            "model": self.model,
            "work": {
                "source": work.source,
                "requests": len(work.prompts),
                "prompt_tokens": work.prompt_tokens,
                "output_tokens": work.output_tokens,
                "slots": self.options.batch_size,
                "rounds": self.options.rounds,
                "seed": self.options.seed,
            },
            "strategies": [result.to_json() for result in self.strategies],
            "roofline": {
                "copy_bytes_per_s": self.rates.bytes_per_s,
                "matrix_flops_per_s": self.rates.flops_per_s,
                **asdict(self.bound),
                "floor_s": self.bound.seconds,
                "assumed": self.assumed,
            },
        }
        if (gain := self.gain) is not None:
            data["gain"] = asdict(gain)
        return data | {"techniques": techniques} if techniques else data
