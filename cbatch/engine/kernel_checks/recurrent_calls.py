"""Calls of recurrent layers over other steps than the one in which they were noted. Needs no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cbatch.engine.kernel_checks.layer_calls import LayerCall
from cbatch.kernels.layer_ops import Recurrence

STATES = {"convolve": 2, "gated_delta": 3, "selective_scan": 3}
"""Which argument of a recurrent operation holds the states; the next one is the `Recurrence`, and then comes `out`."""

Draw = Callable[..., Tensor]
"""Random numbers: draw(seed, *shape)."""


class StateChunk(NamedTuple):
    """tokens: of a chunk; snapshot: after how many of them its state is copied, 0 for never"""

    tokens: int
    snapshot: int = 0


STEPS = {
    "decode": [StateChunk(1), StateChunk(1, 1), StateChunk(1)],
    "chunks": [StateChunk(1), StateChunk(2), StateChunk(75, 37), StateChunk(1), StateChunk(40, 32), StateChunk(21, 21)],
}
"""Chunks shorter than a convolution, of several tiles, and of some tiles and a few tokens."""


def over_chunks(call: LayerCall, chunks: Sequence[StateChunk], draw: Draw) -> LayerCall:
    """The call over a step of such chunks, with random states and random numbers, which are columns of wider tensors.

    Slots lie in no order. Each chunk has one for a snapshot, too, which is NaN before one is made.
    """
    place, count = STATES[call.name], len(chunks)
    noted: Tensor = call.arguments[place]
    state = noted.new_full((2 * count, *noted.shape[1:]), math.nan)
    state[count:] = draw(0, count, *noted.shape[1:])
    tokens = sum(chunk.tokens for chunk in chunks)
    arguments: list[Any] = []
    for number, one in enumerate(call.arguments):
        if number == place:
            arguments.append(state)
        elif number == place + 1:
            arguments.append(_recurrence_of(chunks, state.device))
        elif number == place + 2:
            arguments.append(one.new_zeros(tokens, one.shape[1]))
        elif isinstance(one, Tensor):
            arguments.append(draw(number + 1, tokens, one.shape[1] + 16).to(one.dtype)[:, 8:-8])
        else:
            arguments.append(one)
    return LayerCall(call.name, tuple(arguments), call.keywords)


def bytes_per_sequence(call: LayerCall) -> int:
    """What a decoding sequence reads and writes."""
    state: Tensor = call.arguments[STATES[call.name]]
    rows = [one[0].nbytes for one in call.arguments if isinstance(one, Tensor) and one.dim() == 2]
    return 2 * state[0].nbytes + sum(rows)


def _recurrence_of(chunks: Sequence[StateChunk], device: torch.device) -> Recurrence:
    count, snapshots = len(chunks), [chunk.snapshot for chunk in chunks]
    starts = [0, *accumulate(chunk.tokens for chunk in chunks)]
    targets = [number if snapshot else -1 for number, snapshot in enumerate(snapshots)]
    columns = starts, range(2 * count - 1, count - 1, -1), snapshots, targets
    tensors = [torch.tensor(list(column), dtype=torch.int32, device=device) for column in columns]
    return Recurrence(tensors[0], tensors[1], tensors[2], tensors[3], max(chunk.tokens for chunk in chunks))
