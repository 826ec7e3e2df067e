"""Checks whole steps of a model, also captured as CUDA graphs: a kernel may be right and be called wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.errors import ModelError, in_short
from cbatch.base.params import SamplingParams
from cbatch.engine.cuda_graphs import GraphCapturer, GraphSizes, Run, StepGraphs, StepParts
from cbatch.engine.kernel_checks.attention import AttentionCall, NotingAttention
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, Workload, product_tolerance, run_check
from cbatch.engine.kernel_checks.made_up_steps import (
    empty_cache,
    empty_states,
    made_up_adapters,
    made_up_sequences,
    made_up_states,
    num_blocks,
    ragged_batch,
)
from cbatch.model.base import Model
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.transfer import computing_on, to_device
from cbatch.sample.sampler import Sampler, pack_sampling_params

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
"""Most that rounding changes the logits of a whole model, as a share of their spread.

It may send a token to another expert. What only a single kernel does wrong is found by its own check.
"""

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

    block_size: int
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
            with computing_on(plain.device), torch.inference_mode():
                logits = StepRunner(plain, attention, block_size, steps).run()
        except Exception as error:  # whatever a device or a library raises
            raise ModelError(
                f"{plain.name} does not run on {plain.device}, even by operations of torch alone ({in_short(error)})."
            ) from error
        return cls(block_size, steps, logits, tuple(attention.calls))

    def check(
        self,
        name: str,
        model: Model,
        attention: AttentionBackend,
        tolerance: float | None = None,
        workload: Callable[[], Workload] | None = None,
    ) -> KernelCheck:
        """Compares the steps of a model with an attention backend. tolerance: that of rounding by default"""

        def measure() -> float:
            return self._error(StepRunner(model, attention, self.block_size, self.steps).run())

        rounding = product_tolerance(model.dtype, _TOLERANCES[model.dtype])
        return run_check(name, model.device, tolerance or rounding, measure, workload)

    def check_captured(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        capture: Callable[[Run], Run] | None = None,
    ) -> KernelCheck:
        """Compares steps that are replayed from CUDA graphs: two mixed ones, and two that decode, with their samples.

        model, attention: that graphs can capture
        capture:          captures what has run once; see `GraphCapturer`
        """

        def measure() -> float:
            runner, found = StepRunner(model, attention, self.block_size, self.steps), list[Tensor]()
            sequences, tokens = len(self.steps[0]), sum(stop - start for start, stop in self.steps[0])
            sizes = GraphSizes(decode=(sequences + 1,), mixed=(tokens + 2,), max_seqs=sequences + 1)
            assert model.capturable is not None
            parts = StepParts(model.capturable, attention, runner.kv_cache, sampler, runner.state_pool)
            graphs = StepGraphs(parts, sizes, capture or GraphCapturer(model.device))
            if graphs.reason:
                raise RuntimeError(graphs.reason)
            for step in range(len(self.steps)):
                packed = _packed_params(sequences, step)
                logits = graphs.forward(replace(runner.batch(step), sampling_params=partial(np.copy, packed)))
                if logits is None:
                    raise RuntimeError(f"A step of {tokens} tokens is not replayed.")
                found.append(logits.values.clone())
                if (sampled := logits.sampled) is not None:  # the tokens that the sampler gives outside of a graph
                    wanted = sampler.sample_on_device(found[-1], to_device([packed], model.device)[0])
                    pairs = (sampled.tokens, wanted.tokens), (sampled.largest, wanted.largest)
                    if not all(torch.equal(*pair) for pair in pairs):
                        return math.inf
            return self._error(found)

        tolerance = product_tolerance(model.dtype, _TOLERANCES[model.dtype])
        return run_check("a captured step", model.device, tolerance, measure)

    def _error(self, found: Sequence[Tensor]) -> float:
        """The largest error of a step: the root mean square of the differences, as a share of the logits' spread."""
        errors = []
        for mine, theirs in zip(found, self.logits, strict=True):
            error = float((mine - theirs).square().mean().sqrt() / theirs.std().clamp(min=1e-12))
            errors.append(error if math.isfinite(error) else math.inf)
        return max(errors)


def _packed_params(rows: int, step: int) -> NDArray[np.int32]:
    """Sampling parameters of a step: greedy rows and others."""
    params = [SamplingParams(temperature=row % 2 * 1.5) for row in range(rows)]
    return pack_sampling_params(made_up_sequences(params, [step] * rows), [step] * rows)


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
        batch = made_up_adapters(model, batch)
        return batch if self.state_pool is None else replace(batch, states=made_up_states(self.state_pool, batch))

    def run(self) -> list[Tensor]:
        """Logits [S, vocabulary] float32 of each step."""
        batches = map(self.batch, range(len(self._steps)))
        return [self.model.forward(batch, self.kv_cache, self.attention).values.float().clone() for batch in batches]
