"""Shows, with the loaded weights, that a model gives on a ragged batch what it gives alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cbatch.engine.attention.reference import ReferenceAttention
from cbatch.engine.base.errors import ModelError
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.models.hf_adapter import TransformersModel
from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.kv_cache import KVCache
from cbatch.engine.scheduler.output import ScheduledChunk, SchedulerOutput
from cbatch.engine.scheduler.request import Request

_LENGTHS = (11, 7)
# Slices of one token: the left neighbour of the second in the ragged row is not its own.
_CHUNKS = [(0, 10), (0, 6)], [(10, 11), (6, 7)]
_WHOLE = ([(0, 11), (0, 7)],)
_BLOCK_SIZE = 4


def checked_model(network: Any) -> TransformersModel:
    """A network of transformers, ready to run ragged batches. Raises ModelError where it would be wrong there."""
    model = TransformersModel(network)
    check_ragged(model)
    return model


def check_ragged(model: TransformersModel) -> None:
    """Runs two sequences side by side in two chunks each, and compares with the model's own forward of each alone;
    then one of them beside the last positions of the context.

    Raises ModelError where they differ by more than rounding: then something in the model looks across tokens
    without going through attention, or a long text changes what others mean.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(model.vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    try:
        with torch.inference_mode():
            alone = [model.plain_logits(ids)[-1] for ids in sequences]
            together = _paged_logits(model, sequences, _CHUNKS)
            beside_long = _paged_logits(model, sequences, _WHOLE, far=True)
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{model.name} is not supported: its self-check fails ({error}).") from error
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.15
    distances = [_distance(a.float(), b.float()) for a, b in zip(together, alone, strict=True)]
    if not all(distance <= tolerance for distance in distances):  # a NaN is no small distance
        raise ModelError(
            f"{model.name} is not supported: on a ragged batch its output differs from its own "
            f"by {max(distances):.2g}, so something in it looks across tokens outside of attention, or numbers them "
            "itself."
        )
    distance = _distance(beside_long[0].float(), alone[0].float())
    if not distance <= tolerance:
        raise ModelError(
            f"{model.name} is not supported: beside a text of {model.max_model_len} tokens its output differs from "
            f"its own by {distance:.2g}, so what its positions mean depends on the longest text."
        )


def _paged_logits(
    model: TransformersModel,
    sequences: list[list[int]],
    chunks: Iterable[list[tuple[int, int]]],
    *,
    far: bool = False,
) -> Tensor:
    """Logits [2, vocabulary] after the last chunk. far: the second sequence is at the end of the context."""
    requests = [
        Request(id=number, token_ids=ids, params=SamplingParams(), max_new_tokens=1)
        for number, ids in enumerate(sequences)
    ]
    # Blocks in an order of their own, so that a model cannot be right by reading the cache straight on.
    requests[0].blocks, requests[1].blocks = [4, 1, 3], [0, 2]
    attention = ReferenceAttention()
    shapes = [attention.block_shapes(layer, _BLOCK_SIZE, model.dtype) for layer in model.layers]
    kv_cache = KVCache(shapes, 5, _BLOCK_SIZE, model.dtype, model.device)
    for bounds in chunks:
        slices = []
        for request, (start, stop) in zip(requests, bounds, strict=True):
            request.num_computed = start
            slices.append(ScheduledChunk.of(request, stop - start))
        batch = RaggedBatch.build(SchedulerOutput(slices), _BLOCK_SIZE, model.device)
        if far:
            batch.position_ids[slices[0].num_tokens :] += max(model.max_model_len - _LENGTHS[1], 0)
        logits = model.forward(batch, kv_cache, attention).values
    return logits


def _distance(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference, in units of the spread of the values."""
    return float((a - b).square().mean().sqrt() / b.std().clamp(min=1e-12))
