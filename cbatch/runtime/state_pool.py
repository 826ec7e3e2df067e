"""The memory of recurrent state: a slot for each running request, beside the pages of the KV cache.

Recurrent layers (gated delta nets, state-space models, short convolutions) keep tensors of fixed size for a sequence,
however long it is. A slot has a place in each of them. Snapshots, from which requests with the same beginning go on,
are slots too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.cpu import empty_tensor
from cbatch.runtime.transfer import to_device
from cbatch.schedule.state_slots import ZERO, ChunkState


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor that a recurrent layer keeps for each sequence. Before the first token it is zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StatePool:
    """The states of all recurrent layers in `num_slots` slots.

    tensors: of each state [num_slots, *shape]; what a slot holds is undefined until it is zeroed or copied to
    flat:    the memory of all, one state after the other; None if they have several types, or are not on a CPU
    """

    def __init__(
        self, shapes: Sequence[StateShape], num_slots: int, device: torch.device | Sequence[torch.device]
    ) -> None:
        """device: of all states, or of each"""
        self.num_slots = num_slots
        devices = [device] * len(shapes) if isinstance(device, torch.device) else device
        self.flat: Tensor | None = None
        if len({state.dtype for state in shapes}) != 1 or any(device.type != "cpu" for device in devices):
            self.tensors = [
                empty_tensor(num_slots, *state.shape, dtype=state.dtype, device=place)
                for state, place in zip(shapes, devices, strict=True)
            ]
            return
        sizes = [num_slots * math.prod(state.shape) for state in shapes]
        self.flat = empty_tensor(sum(sizes), dtype=shapes[0].dtype, device=devices[0])
        parts = torch.split(self.flat, sizes)
        self.tensors = [part.view(num_slots, *state.shape) for part, state in zip(parts, shapes, strict=True)]

    @property
    def slot_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self.tensors)

    def zero(self, slots: Sequence[int]) -> None:
        """Makes slots those of sequences without a token."""
        places = self._on_devices(slots)
        for tensor in self.tensors:
            (written,) = places[tensor.device]
            tensor.index_fill_(0, written, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots to slots; no target is a source."""
        places = self._on_devices(sources, targets)
        for tensor in self.tensors:
            read, written = places[tensor.device]
            tensor.index_copy_(0, written, tensor.index_select(0, read))

    def _on_devices(self, *slots: Sequence[int]) -> dict[torch.device, list[Tensor]]:
        """Lists of slots on each device that has states; the host waits for none of the copies."""
        arrays = [np.array(one, np.int64) for one in slots]
        return {device: to_device(arrays, device) for device in {tensor.device for tensor in self.tensors}}


@dataclass(frozen=True, slots=True)
class StepStates:
    """Where the S chunks of a step have their states.

    pool:            of which a model reads and writes slots, once `prepare` was called
    slots:           [S] int64, slot of each chunk: read before its first token, and written after its last
    snapshot_counts: [S] int64, number of the chunk's tokens after which its state is copied
    snapshot_slots:  [S] int64, where it is copied to; -1 if it is not
    to_zero:         slots of chunks that begin a sequence
    sources, targets: slots that are copied, and where to, before the step is computed
    """

    pool: StatePool
    slots: NDArray[np.int64]
    snapshot_counts: NDArray[np.int64]
    snapshot_slots: NDArray[np.int64]
    to_zero: Sequence[int] = ()
    sources: Sequence[int] = ()
    targets: Sequence[int] = ()

    @classmethod
    def of(cls, pool: StatePool, starts: Sequence[int], chunks: Sequence[ChunkState | None]) -> StepStates:
        """starts: first token of each chunk"""
        states = [state for state in chunks if state is not None]
        copied = [state for state in states if state.source not in (None, ZERO)]
        made = [(start, state.snapshot) for start, state in zip(starts, states, strict=True)]
        return cls(
            pool,
            np.array([state.slot for state in states], np.int64),
            np.array([0 if snapshot is None else snapshot.tokens - start for start, snapshot in made], np.int64),
            np.array([-1 if snapshot is None else snapshot.slot for _, snapshot in made], np.int64),
            [state.slot for state in states if state.source == ZERO],
            [state.source for state in copied if state.source is not None],
            [state.slot for state in copied],
        )

    @property
    def beside_pool(self) -> tuple[Any, ...]:
        """The other fields."""
        return tuple(getattr(self, one.name) for one in fields(self)[1:])

    def prepare(self) -> None:
        """Gives the slots of chunks that begin a sequence, or go on from a snapshot, what they are to hold."""
        if self.to_zero:
            self.pool.zero(self.to_zero)
        if self.targets:
            self.pool.copy(self.sources, self.targets)
