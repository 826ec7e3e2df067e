"""Metrics of a recorded run."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.workload import Workload
from cbatch.cli.common.percentiles import Percentiles


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of one run, named as in `--json`: times in seconds, shares in 0..1, memory in bytes.

    padded_token_share:  share of padding among the tokens of padded prompts
    wasted_output_share: share of the output tokens that nobody wanted
    idle_slot_share:     share of slots, over all steps, that were empty or computed nothing useful
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
    padding, generated = record.tokens("padding"), record.generated_tokens
    computed, slot_steps = record.tokens("prefill", "decode", "padding", "idle"), record.useful_slot_steps
    blocks_used = [step.blocks_used for step in record.steps]
    return RunMetrics(
        elapsed_s=record.elapsed_s,
        output_tokens_per_s=work.output_tokens / elapsed,
        total_tokens_per_s=(work.prompt_tokens + work.output_tokens) / elapsed,
        ttft_s=Percentiles.of(first),
        tpot_s=Percentiles.of(per_token),
        padded_token_share=padding / max(record.tokens("prefill", "padding"), 1),
        wasted_output_share=(generated - record.wanted_tokens) / max(generated, 1),
        idle_slot_share=1 - slot_steps / max(record.slots * len(record.steps), 1),
        steps=len(record.steps),
        tokens_computed=computed,
        tokens_per_step=computed / num_steps,
        slots_in_use=slot_steps / num_steps,
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
