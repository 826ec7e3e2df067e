"""Compares, with the loaded weights, a model's output on a ragged batch with its own output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ModelError
from cbatch.base.request import Request
from cbatch.model.hf.adapter import TransformersModel
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.state_pool import StatePool
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import ZERO, ChunkState, Snapshot

_LENGTHS = (11, 7)
# The last chunks are one token each: in the ragged row, the token left of the second is of another sequence.
_CHUNKS = [(0, 10), (0, 6)], [(10, 11), (6, 7)]
_WHOLE = ([(0, 11), (0, 7)],)
# With recurrent layers also a chunk that goes on, and one that goes on from a snapshot in another slot.
_RESUMED = [(0, 4), (0, 3)], [(3, 10), (2, 6)], [(10, 11), (6, 7)]
_SNAPSHOTS = 3, 2
_BLOCK_SIZE = 4
_NUM_SLOTS = 6


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
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(model.vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    try:
        with torch.inference_mode():
            alone = [model.plain(ids)[-1].cpu() for ids in sequences]
            batched = _paged_logits(model, sequences, _CHUNKS)
            beside_long = _paged_logits(model, sequences, _WHOLE, far=True)
            resumed = _paged_logits(model, sequences, _RESUMED, resumed=True) if model.states else batched
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{model.name} is not supported: its self-check fails ({error}).") from error
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.15
    pairs = [*zip(batched, alone, strict=True), *zip(resumed, alone, strict=True)]
    errors = [_relative_error(a.float(), b.float()) for a, b in pairs]
    if not all(each <= tolerance for each in errors):  # so that NaN fails too
        raise ModelError(
            f"{model.name} is not supported: its output on a ragged batch differs from its own by {max(errors):.2g}. "
            "It mixes tokens outside attention, or computes its own position ids."
        )
    far_error = _relative_error(beside_long[0].float(), alone[0].float())
    if not far_error <= tolerance:
        raise ModelError(
            f"{model.name} is not supported: beside a text of {model.max_model_len} tokens its output differs from "
            f"its own by {far_error:.2g}. Its position encoding depends on the longest text."
        )


def _paged_logits(
    model: TransformersModel,
    prompts: list[list[int]],
    chunks: Iterable[list[tuple[int, int]]],
    *,
    far: bool = False,
    resumed: bool = False,
) -> Tensor:
    """Logits [2, vocabulary] after the last chunk.

    far:     the second sequence is at the end of the context
    resumed: the second chunks begin before the end of the first ones, from snapshots made in these
    """
    sequences = [TokenSequence(number, ids, Request(max_new_tokens=1)) for number, ids in enumerate(prompts)]
    # Blocks out of order, so that a model cannot be right by reading the cache in order.
    sequences[0].blocks, sequences[1].blocks = [4, 1, 3], [0, 2]
    attention = ReferenceAttention()
    shapes = [attention.block_shapes(layer, _BLOCK_SIZE, model.dtype) for layer in model.layers]
    kv_cache = KVCache(shapes, 5, _BLOCK_SIZE, model.dtype, model.layer_devices)
    pool = StatePool(model.states, _NUM_SLOTS, model.state_devices) if model.states else None
    for tensor in pool.tensors if pool is not None else ():
        tensor.fill_(7.0)  # as if others had left numbers there
    for step, bounds in enumerate(chunks):
        slices = []
        for number, (sequence, (start, stop)) in enumerate(zip(sequences, bounds, strict=True)):
            sequence.num_computed = start
            state = _chunk_state(number, step, resumed=resumed) if pool is not None else None
            slices.append(ScheduledChunk.of(sequence, stop - start, state))
        batch = RaggedBatch.build(SchedulerOutput(slices), _BLOCK_SIZE, model.device, state_pool=pool)
        if batch.states is not None:
            batch.states.prepare()
        if far:
            batch.position_ids[slices[0].num_tokens :] += max(model.max_model_len - _LENGTHS[1], 0)
        logits = model.forward(batch, kv_cache, attention).values.cpu()
    return logits


def _chunk_state(number: int, step: int, *, resumed: bool) -> ChunkState:
    """Of the chunk of a sequence in a step. resumed: its second chunk has another slot and goes on from a snapshot."""
    snapshot = Snapshot(4 + number, _SNAPSHOTS[number], step)
    if not resumed:
        return ChunkState(2 * number + 1, [], ZERO if step == 0 else None)
    if step == 0:
        return ChunkState(2 * number + 1, [], ZERO, snapshot)
    return ChunkState(2 * number, [], snapshot.slot if step == 1 else None)


def _relative_error(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference, relative to the standard deviation of the values."""
    return float((a - b).square().mean().sqrt() / b.std().clamp(min=1e-12))
