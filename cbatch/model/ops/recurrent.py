"""Code of all recurrent operations: the pieces of a step, and a scan over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from cbatch.kernels.operands import Recurrence
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.weight import Weight


class Piece(NamedTuple):
    """Rows `start .. stop-1` of a step, a chunk or a part of one, and the slot to which its state is copied after."""

    start: int
    stop: int
    slot: int
    copy_to: int

    def keep(self, state: Tensor, now: Tensor) -> None:
        """Keeps the state [slots, ...] that the rows have led to."""
        state[self.slot] = now
        if self.copy_to >= 0:
            state[self.copy_to] = state[self.slot]


def pieces(recurrence: Recurrence) -> Iterator[Piece]:
    """The host reads where the chunks of a step begin, so such steps cannot be captured as graphs."""
    starts, *columns = (
        column.tolist()
        for column in (recurrence.starts, recurrence.slots, recurrence.snapshot_counts, recurrence.snapshot_slots)
    )
    for start, stop, slot, count, copy_to in zip(starts, starts[1:], *columns, strict=False):
        if slot < 0:
            continue
        between = start + count if copy_to >= 0 else stop
        if between > start:
            yield Piece(start, between, slot, copy_to)
        if between < stop:
            yield Piece(between, stop, slot, -1)


def scanned(state: Tensor, recurrence: Recurrence, out: Tensor, step: Callable[[Tensor, int], Any]) -> None:
    """out [T, ...] += what each row gives; step: from a state and a row to the next state and that"""
    for piece in pieces(recurrence):
        now = state[piece.slot].float()
        for row in range(piece.start, piece.stop):
            now, given = step(now, row)
            out[row] += given
        piece.keep(state, now)


def decay_vector(layout: CpuLayout, log: Weight, heads: int) -> int:
    """Where -exp of a weight begins among the vectors."""
    return layout.numbers(heads, lambda tensors: -log.read(tensors[log.name]).float().flatten().exp())
