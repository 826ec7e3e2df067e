"""Compares, with the loaded weights, a model's output on a ragged batch with its own output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ModelError
from cbatch.model.hf.adapter import TransformersModel
from cbatch.model.made_up_steps import StepRunner
from cbatch.runtime.state_pool import StepStates

_LENGTHS = (11, 7)
# The last chunks are one token each: in the ragged row, the token left of the second is of another sequence.
_CHUNKS = [(0, 10), (0, 6)], [(10, 11), (6, 7)]
_WHOLE = ([(0, 11), (0, 7)],)
# With recurrent layers also a chunk that goes on from a snapshot in another slot, beside one that goes on.
_RESUMED = [(0, 4), (0, 3)], [(3, 10), (3, 6)], [(10, 11), (6, 7)]
_BLOCK_SIZE = 4


def checked_model(network: Any) -> TransformersModel:
    """A transformers model, ready to run ragged batches. Raises ModelError if it would be wrong there."""
    model = TransformersModel(network)
    try:
        check_ragged(model)
    except ModelError:
        if not model.go_on_by_token():
            raise
        check_ragged(model)
    return model


def check_ragged(model: TransformersModel) -> None:
    """Runs two sequences side by side in two chunks each, and one of them beside the last positions of the context.

    Raises ModelError if the results differ by more than rounding from the model's own forward of each sequence alone.
    Then the model mixes tokens outside attention, or a long text changes the positions of others.
    """
    attention = ReferenceAttention()
    try:
        with torch.inference_mode():
            sequences = np.split(StepRunner(model, attention, _BLOCK_SIZE, _WHOLE).batch(0).ids, _LENGTHS[:1])
            alone = [model.plain(ids.tolist())[-1].float() for ids in sequences]
            batched = StepRunner(model, attention, _BLOCK_SIZE, _CHUNKS).run()[-1]
            beside_long = _beside_long(StepRunner(model, attention, _BLOCK_SIZE, _WHOLE))
            resumed = _resumed(StepRunner(model, attention, _BLOCK_SIZE, _RESUMED)) if model.states else batched
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{model.name} is not supported: its self-check fails ({error}).") from error
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.15
    pairs = [*zip(batched, alone, strict=True), *zip(resumed, alone, strict=True)]
    errors = [_relative_error(*pair) for pair in pairs]
    if not all(each <= tolerance for each in errors):  # so that NaN fails too
        raise ModelError(
            f"{model.name} is not supported: its output on a ragged batch differs from its own by {max(errors):.2g}. "
            "It mixes tokens outside attention, or computes its own position ids."
        )
    far_error = _relative_error(beside_long[0], alone[0])
    if not far_error <= tolerance:
        raise ModelError(
            f"{model.name} is not supported: beside a text of {model.max_model_len} tokens its output differs from "
            f"its own by {far_error:.2g}. Its position encoding depends on the longest text."
        )


def _beside_long(runner: StepRunner) -> Tensor:
    """Logits [2, vocabulary] of whole sequences, of which the second is at the end of the context."""
    batch = runner.batch(0)
    batch.position_ids[_LENGTHS[0] :] += max(runner.model.max_model_len - _LENGTHS[1], 0)
    return runner.logits(batch)


def _resumed(runner: StepRunner) -> Tensor:
    """Logits [2, vocabulary] after the last chunk. The second one of a sequence begins before the end of the first."""
    pool = runner.state_pool
    assert pool is not None
    first, later = np.array([1, 3]), np.array([0, 3])
    counts, targets, none = np.array([3, 0]), np.array([4, -1]), np.array([-1, -1])
    states = (
        StepStates(pool, first, counts, targets),
        StepStates(pool, later, counts, none, sources=[4], targets=[0]),
        StepStates(pool, later, counts, none),
    )
    for step, one in enumerate(states):
        one.prepare()
        logits = runner.logits(replace(runner.batch(step), states=one))
    return logits


def _relative_error(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference, relative to the standard deviation of the values."""
    return float((a - b).square().mean().sqrt() / b.std().clamp(min=1e-12))
