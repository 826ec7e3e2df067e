"""What the trace of a run says in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.workload import Workload
from cbatch.cli.run.stats import percentiles


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that a run computed: of prompts, wanted output, dummies beside prompts, output past a row's end.

    generated: output tokens in all; slot_steps: slots times steps; useful_slot_steps: those that computed for a row
    that was not done
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
            generated=sum(len(row.tokens) for row in record.rows),
            wanted=sum(row.wanted for row in record.rows),
            slot_steps=record.slots * len(record.steps),
            useful_slot_steps=sum(step.slots("prefill", "decode") for step in record.steps),
        )

    @property
    def computed(self) -> int:
        return self.prefill + self.decode + self.padding + self.idle

    @property
    def padded_token_share(self) -> float:
        """Of the tokens of padded prompts, those that are padding."""
        return self.padding / max(self.prefill + self.padding, 1)

    @property
    def wasted_output_share(self) -> float:
        """Of the output tokens, those that nobody wanted."""
        return (self.generated - self.wanted) / max(self.generated, 1)

    @property
    def idle_slot_share(self) -> float:
        """Of all slots in all steps, those that were empty, or busy with nothing that anybody wanted."""
        return 1 - self.useful_slot_steps / max(self.slot_steps, 1)


def run_metrics(record: RunRecord, work: Workload) -> dict[str, Any]:
    """Times in seconds, shares in 0..1, memory in bytes."""
    counts = TokenCounts.of(record)
    elapsed = max(record.elapsed_s, 1e-9)
    first = [row.first for row in record.rows if row.first is not None]
    paces = [
        (row.last - row.first) / (row.wanted - 1)
        for row in record.rows
        if row.first is not None and row.last is not None and row.wanted > 1
    ]
    model_s = sum(step.model_s for step in record.steps)
    step_s = sum(step.end - step.start for step in record.steps)
    num_steps = max(len(record.steps), 1)
    return {
        "elapsed_s": record.elapsed_s,
        "output_tokens_per_s": work.output_tokens / elapsed,
        "total_tokens_per_s": (work.prompt_tokens + work.output_tokens) / elapsed,
        "ttft_s": percentiles(first),
        "tpot_s": percentiles(paces),
        "padded_token_share": counts.padded_token_share,
        "wasted_output_share": counts.wasted_output_share,
        "idle_slot_share": counts.idle_slot_share,
        "steps": len(record.steps),
        "tokens_computed": counts.computed,
        "tokens_per_step": counts.computed / num_steps,
        "slots_in_use": counts.useful_slot_steps / num_steps,
        "cache_use_mean": sum(step.blocks_used for step in record.steps) / num_steps / record.num_blocks,
        "cache_use_peak": max((step.blocks_used for step in record.steps), default=0) / record.num_blocks,
        "preemptions": record.preemptions,
        "model_s": model_s,
        "outside_model_share": 1 - model_s / step_s if step_s else 0.0,
        "peak_memory_bytes": record.peak_bytes,
    }


def compare_outputs(record: RunRecord, reference: RunRecord) -> dict[str, Any]:
    """How far the outputs of two runs are the same: share of equal rows, and where they first differ."""
    pairs = [
        (row.tokens[: row.wanted], other.tokens[: other.wanted])
        for row, other in zip(record.rows, reference.rows, strict=True)
    ]
    unequal = [number for number, (here, there) in enumerate(pairs) if here != there]
    found: dict[str, Any] = {"equal_rows_share": 1 - len(unequal) / max(len(pairs), 1), "first_difference": None}
    if unequal:
        here, there = pairs[unequal[0]]
        place = next(
            (n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there))
        )
        found["first_difference"] = {"row": unequal[0], "token": place}
    return found
