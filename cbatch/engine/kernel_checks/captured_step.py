"""Checks steps that are captured as CUDA graphs and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.attention.base import CapturableAttention
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.cuda_graphs import GraphCapturer, GraphSizes, Run, StepGraphs, StepParts
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, run_check
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps, StepRunner, step_tolerance
from cbatch.model.base import CapturableModel, Model
from cbatch.runtime.batch import SampledOnDevice
from cbatch.runtime.transfer import to_device
from cbatch.sample.sampler import Sampler, pack_sampling_params
from cbatch.schedule.sequence import TokenSequence


def check_captured(
    expected: ExpectedSteps,
    model: Model,
    attention: CapturableAttention,
    sampler: Sampler,
    block_size: int,
    capture: Callable[[Run], Run] | None = None,
) -> KernelCheck:
    """Compares steps that are replayed from CUDA graphs: two mixed ones, and two that decode, with their samples.

    model:   one that has a `capturable` part
    capture: captures what has run once; see `GraphCapturer`
    """

    def measure() -> float:
        runner, found = StepRunner(model, attention, block_size, expected.steps), list[Tensor]()
        sequences, tokens = len(expected.steps[0]), sum(stop - start for start, stop in expected.steps[0])
        sizes = GraphSizes(decode=(sequences + 1,), mixed=(tokens + 2,), max_seqs=sequences + 1)
        parts = StepParts(
            cast(CapturableModel, model.capturable), attention, runner.kv_cache, sampler, runner.state_pool
        )
        graphs = _captured(parts, sizes, capture or GraphCapturer(model.device))
        for step in range(len(expected.steps)):
            params = partial(_packed_params, sequences, step)
            logits = graphs.forward(replace(runner.batch(step), sampling_params=params))
            if logits is None:
                raise RuntimeError(f"A step of {tokens} tokens is not replayed.")
            found.append(logits.values.clone())
            if logits.sampled is not None and not _is_sampled(logits.sampled, sampler, found[-1], params()):
                return math.inf
        return expected.error(found)

    return run_check("a captured step", model.device, step_tolerance(model.dtype), measure)


def _captured(parts: StepParts, sizes: GraphSizes, capture: Callable[[Run], Run]) -> StepGraphs:
    """Raises what a capture raised, and RuntimeError if not all were made: the engine would only warn of it."""
    failures: list[Exception] = []

    def keeping_failures(run: Run) -> Run:
        try:
            return capture(run)
        except Exception as error:
            failures.append(error)
            raise

    graphs = StepGraphs(parts, sizes, keeping_failures)
    if failures:
        raise failures[0]
    if graphs.problem:
        raise RuntimeError(graphs.problem)
    return graphs


def _packed_params(rows: int, step: int) -> NDArray[np.int32]:
    """Sampling parameters of a step: greedy rows and others."""
    params = [SamplingParams(temperature=row % 2 * 1.5) for row in range(rows)]
    sequences = [
        TokenSequence(row, [1], Request(params=one, max_new_tokens=1, seed=step)) for row, one in enumerate(params)
    ]
    return pack_sampling_params(sequences, [step] * rows)


def _is_sampled(found: SampledOnDevice, sampler: Sampler, logits: Tensor, packed: NDArray[np.int32]) -> bool:
    """Whether these are the tokens that the sampler gives outside of a graph."""
    expected = sampler.sample_on_device(logits, to_device([packed], logits.device)[0])
    return torch.equal(found.tokens, expected.tokens) and torch.equal(found.largest, expected.largest)
