"""Checks whole steps of a model: a kernel may be right and be called wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.attention.base import AttentionBackend, CapturableAttention
from cbatch.engine.base.errors import ModelError
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.execution.cuda_graphs import GraphCapturer, GraphSizes, Run, StepGraphs, StepParts
from cbatch.engine.execution.kernel_checks.attention import (
    AttentionCall,
    NotingAttention,
    empty_cache,
    num_blocks,
    ragged_batch,
)
from cbatch.engine.execution.kernel_checks.check import KernelCheck, Workload, first_line, product_tolerance, run_check
from cbatch.engine.models.base import CapturableModel, Model
from cbatch.engine.runtime.batch import RaggedBatch, SampledOnDevice
from cbatch.engine.runtime.transfer import to_device, use_device
from cbatch.engine.sampling.sampler import Sampler, pack_sampling_params
from cbatch.engine.scheduler.request import Request

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
"""Most that rounding changes the logits of a whole model, as a share of their spread.

It may send a token to another expert. What only a single kernel does wrong is found by its own check.
"""


def _tolerance(dtype: torch.dtype) -> float:
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
    """What a model gives with plain torch.

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
                f"{plain.name} does not run on {plain.device}, even by operations of torch alone ({first_line(error)})."
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

        return run_check(name, model.device, tolerance or _tolerance(model.dtype), measure, workload)

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
        self.kv_cache = empty_cache(attention, model.layers, blocks, block_size, model.dtype, model.device)

    def batch(self, step: int) -> RaggedBatch:
        model, size = self.model, self.kv_cache.block_size
        return ragged_batch(self._steps[step], size, model.device, model.vocab_size, self._lengths)

    def forward(self, step: int) -> Tensor:
        """Logits [S, vocabulary] float32."""
        return self.model.forward(self.batch(step), self.kv_cache, self.attention).values.float()


def run_steps(model: Model, attention: AttentionBackend, block_size: int, steps: Steps) -> list[Tensor]:
    """Logits [S, vocabulary] float32 of each step."""
    runner = StepRunner(model, attention, block_size, steps)
    return [runner.forward(step).clone() for step in range(len(steps))]


def check_captured(
    expected: ExpectedSteps,
    model: CapturableModel,
    attention: CapturableAttention,
    sampler: Sampler,
    block_size: int,
    capture: Callable[[Run], Run] | None = None,
) -> KernelCheck:
    """Compares steps that are replayed from CUDA graphs: two mixed ones, and two that decode, with their samples."""

    def measure() -> float:
        runner = StepRunner(cast(Model, model), attention, block_size, expected.steps)
        tokens = sum(stop - start for start, stop in expected.steps[0])
        sequences = len(expected.steps[0])
        failures: list[Exception] = []
        capturer = capture or GraphCapturer(model.device)

        def noting(run: Run) -> Run:
            try:
                return capturer(run)
            except Exception as error:
                failures.append(error)
                raise

        sizes = GraphSizes(decode=(sequences + 1,), mixed=(tokens + 2,), max_seqs=sequences + 1)
        graphs = StepGraphs(StepParts(model, attention, runner.kv_cache, sampler), sizes, noting)
        if failures:
            raise failures[0]
        if graphs.problem:
            raise RuntimeError(graphs.problem)
        found = []
        for step in range(len(expected.steps)):
            params = partial(_sampling_words, sequences, step)
            logits = graphs.forward(replace(runner.batch(step), sampling_params=params))
            if logits is None:
                raise RuntimeError(f"A step of {tokens} tokens is not replayed.")
            found.append(logits.values.clone())
            if logits.sampled is not None and not _is_sampled(logits.sampled, sampler, found[-1], params()):
                return math.inf
        return expected.error(found)

    return run_check("a captured step", model.device, _tolerance(cast(Model, model).dtype), measure)


def _sampling_words(rows: int, step: int) -> NDArray[np.int32]:
    """Sampling parameters of a step: greedy rows and others."""
    params = [SamplingParams(temperature=row % 2 * 1.5) for row in range(rows)]
    requests = [Request(row, [1], one, max_new_tokens=1, seed=step) for row, one in enumerate(params)]
    return pack_sampling_params(requests, [step] * rows)


def _is_sampled(found: SampledOnDevice, sampler: Sampler, logits: Tensor, words: NDArray[np.int32]) -> bool:
    """Whether these are the tokens that the sampler gives outside of a graph."""
    expected = sampler.sample_on_device(logits, to_device([words], logits.device)[0])
    return torch.equal(found.tokens, expected.tokens) and torch.equal(found.largest, expected.largest)
