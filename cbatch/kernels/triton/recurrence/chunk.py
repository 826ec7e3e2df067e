"""What the kernels of recurrent layers share: where a chunk is, how its state is cut, and softplus."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Recurrence

CHUNK_TENSORS = ["starts", "slots", "snapshot_counts", "snapshot_slots"]
"""Arguments of all these kernels; see `Recurrence`. Where they begin may change from step to step."""


def chunk_tensors(recurrence: Recurrence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of a kernel, in the order of `CHUNK_TENSORS`."""
    return recurrence.starts, recurrence.slots, recurrence.snapshot_counts, recurrence.snapshot_slots


@triton.jit
def read_chunk(
    starts: tl.tensor, slots: tl.tensor, snapshot_counts: tl.tensor, snapshot_slots: tl.tensor, chunk: tl.tensor
) -> tl.tensor:
    """A chunk's first row, tokens (0 for padding), slot, tokens before its snapshot (0 for none), and slot for it."""
    start, slot = tl.load(starts + chunk), tl.load(slots + chunk).to(tl.int64)
    count = tl.where(slot < 0, 0, tl.load(starts + chunk + 1) - start)
    target = tl.load(snapshot_slots + chunk).to(tl.int64)
    return start.to(tl.int64), count, slot, tl.where(target < 0, 0, tl.load(snapshot_counts + chunk)), target


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), exact for small results too.

    With u = exp(-|x|), log(1 + u) is the series of 2 * artanh(u / (2 + u)), whose argument is 1/3 at most. The sum
    1 + u would lose the digits of a small u.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series
