"""Metrics of a recorded run."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.workload import Workload
from cbatch.cli.common.percentiles import Percentiles


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that a run computed.

    prefill, decode, padding, idle: by kind, see `TokenKind`
    generated:         output tokens, wanted or not
    wanted:            output tokens that the workload asked for
    slot_steps:        slots times steps
    useful_slot_steps: those in which a slot worked on a request that was not finished
    """

    prefill: int
    decode: int
    padding: int
    idle: int
    generated: int
    wanted: int
    slot_steps: int
    useful_slot_steps: int

    @classmethod
    def of(cls, record: RunRecord) -> TokenCounts:
        return cls(
            prefill=sum(step.tokens("prefill") for step in record.steps),
            decode=sum(step.tokens("decode") for step in record.steps),
            padding=sum(step.tokens("padding") for step in record.steps),
            idle=sum(step.tokens("idle") for step in record.steps),
            generated=sum(len(request.tokens) for request in record.requests),
            wanted=sum(request.wanted for request in record.requests),
            slot_steps=record.slots * len(record.steps),
            useful_slot_steps=sum(step.slots("prefill", "decode") for step in record.steps),
        )

    @property
    def computed(self) -> int:
        return self.prefill + self.decode + self.padding + self.idle

    @property
    def padded_token_share(self) -> float:
        """Share of padding among the tokens of padded prompts."""
        return self.padding / max(self.prefill + self.padding, 1)

    @property
    def wasted_output_share(self) -> float:
        """Share of the output tokens that nobody wanted."""
        return (self.generated - self.wanted) / max(self.generated, 1)

    @property
    def idle_slot_share(self) -> float:
        """Share of slots, over all steps, that were empty or computed nothing useful."""
        return 1 - self.useful_slot_steps / max(self.slot_steps, 1)


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of one run, named as in `--json`: times in seconds, shares in 0..1, memory in bytes."""

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
    model_s: float
    outside_model_share: float
    peak_memory_bytes: int | None


def run_metrics(record: RunRecord, work: Workload) -> RunMetrics:
    counts = TokenCounts.of(record)
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
    blocks_used = [step.blocks_used for step in record.steps]
    return RunMetrics(
        elapsed_s=record.elapsed_s,
        output_tokens_per_s=work.output_tokens / elapsed,
        total_tokens_per_s=(work.prompt_tokens + work.output_tokens) / elapsed,
        ttft_s=Percentiles.of(first),
        tpot_s=Percentiles.of(per_token),
        padded_token_share=counts.padded_token_share,
        wasted_output_share=counts.wasted_output_share,
        idle_slot_share=counts.idle_slot_share,
        steps=len(record.steps),
        tokens_computed=counts.computed,
        tokens_per_step=counts.computed / num_steps,
        slots_in_use=counts.useful_slot_steps / num_steps,
        cache_use_mean=sum(blocks_used) / num_steps / record.num_blocks,
        cache_use_peak=max(blocks_used, default=0) / record.num_blocks,
        preemptions=record.preemptions,
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


Outputs = list[list[int]]
"""Output tokens of each request."""


def wanted_outputs(record: RunRecord) -> Outputs:
    """Without the tokens past a request's end."""
    return [request.tokens[: request.wanted] for request in record.requests]


def compare_outputs(outputs: Outputs, reference: Outputs) -> OutputDifference:
    unequal = [n for n, (here, there) in enumerate(zip(outputs, reference, strict=True)) if here != there]
    share = 1 - len(unequal) / max(len(outputs), 1)
    if not unequal:
        return OutputDifference(share, None)
    here, there = outputs[unequal[0]], reference[unequal[0]]
    shorter = min(len(here), len(there))
    token = next((n for n in range(shorter) if here[n] != there[n]), shorter)
    return OutputDifference(share, TokenPosition(unequal[0], token))
