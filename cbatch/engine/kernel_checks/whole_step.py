"""Checks whole steps of a model: a kernel may be right and be called wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.errors import ModelError, in_short
from cbatch.engine.kernel_checks.attention import AttentionCall, NotingAttention
from cbatch.engine.kernel_checks.comparison import product_tolerance
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, Workload, run_check
from cbatch.engine.kernel_checks.made_up_steps import (
    empty_cache,
    empty_states,
    made_up_states,
    num_blocks,
    ragged_batch,
)
from cbatch.model.base import Model
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.transfer import use_device

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
"""Most that rounding changes the logits of a whole model, as a share of their spread.

It may send a token to another expert. What only a single kernel does wrong is found by its own check.
"""


def step_tolerance(dtype: torch.dtype) -> float:
    return product_tolerance(dtype, _TOLERANCES[dtype])


Steps = Sequence[Sequence[tuple[int, int]]]


def steps_of(model: Model) -> Steps:
    """Chunks of four steps of three sequences: prompts, a mix of decoding and chunks, and decoding alone, twice."""
    most = max(min(model.max_model_len, 45) - 4, 8)
    first, second, third = most, most // 2, most // 4
    return (
        [(0, first), (0, second), (0, 1)],
        [(first, first + 1), (second, second + 2), (1, third)],
        [(first + 1, first + 2), (second + 2, second + 3), (third, third + 1)],
        [(first + 2, first + 3), (second + 3, second + 4), (third + 1, third + 2)],
    )


@dataclass(frozen=True, slots=True)
class ExpectedSteps:
    """The output of a model with plain torch.

    logits: [S, vocabulary] float32 of each step
    calls:  the ways in which its layers call attention
    """

    steps: Steps
    logits: list[Tensor]
    calls: tuple[AttentionCall, ...]

    @classmethod
    def of(cls, plain: Model, block_size: int, kv_dtype: torch.dtype | None = None) -> ExpectedSteps:
        """plain: the model without kernels of ours; kv_dtype: type of the KV cache, None: that of the model

        Raises ModelError if not even that runs.
        """
        attention, steps = NotingAttention(kv_dtype), steps_of(plain)
        try:
            with use_device(plain.device), torch.inference_mode():
                logits = run_steps(plain, attention, block_size, steps)
        except Exception as error:  # whatever a device or a library raises
            raise ModelError(
                f"{plain.name} does not run on {plain.device}, even by operations of torch alone ({in_short(error)})."
            ) from error
        return cls(steps, logits, tuple(attention.calls))

    def check(
        self,
        name: str,
        model: Model,
        attention: AttentionBackend,
        block_size: int,
        tolerance: float | None = None,
        workload: Callable[[], Workload] | None = None,
    ) -> KernelCheck:
        """Compares the steps of a model with an attention backend. tolerance: that of rounding by default"""

        def measure() -> float:
            return self.error(run_steps(model, attention, block_size, self.steps))

        return run_check(name, model.device, tolerance or step_tolerance(model.dtype), measure, workload)

    def error(self, found: Sequence[Tensor]) -> float:
        """The largest error of a step: the root mean square of the differences, as a share of the logits' spread."""
        errors = []
        for mine, theirs in zip(found, self.logits, strict=True):
            error = float((mine - theirs).square().mean().sqrt() / theirs.std().clamp(min=1e-12))
            errors.append(error if math.isfinite(error) else math.inf)
        return max(errors)


class StepRunner:
    """Runs the steps of a check one after the other, over a cache of their own."""

    def __init__(self, model: Model, attention: AttentionBackend, block_size: int, steps: Steps) -> None:
        self.model, self.attention, self._steps = model, attention, steps
        self._lengths = [stop for _, stop in steps[-1]]
        blocks = num_blocks(steps[-1], block_size)
        self.kv_cache = empty_cache(attention, model.layers, blocks, block_size, model.dtype, model.layer_devices)
        self.state_pool = empty_states(model, len(self._lengths)) if model.states else None

    def batch(self, step: int) -> RaggedBatch:
        model, size = self.model, self.kv_cache.block_size
        batch = ragged_batch(self._steps[step], size, model.device, model.vocab_size, self._lengths)
        return batch if self.state_pool is None else replace(batch, states=made_up_states(self.state_pool, batch))

    def forward(self, step: int) -> Tensor:
        """Logits [S, vocabulary] float32."""
        return self.model.forward(self.batch(step), self.kv_cache, self.attention).values.float()


def run_steps(model: Model, attention: AttentionBackend, block_size: int, steps: Steps) -> list[Tensor]:
    """Logits [S, vocabulary] float32 of each step."""
    runner = StepRunner(model, attention, block_size, steps)
    return [runner.forward(step).clone() for step in range(len(steps))]
