"""The scan of Mamba 2 (Dao and Gu, https://arxiv.org/abs/2405.21060).

`SelectiveScan` in `models/programs/program.py` has the formulas. States may be of any type; what is computed is
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbatch.engine.kernels.layer_ops import Recurrence, ScanHeads
from cbatch.engine.kernels.triton.recurrence.chunk import (
    CHUNK_TENSORS,
    chunk_tensors,
    read_chunk,
    softplus,
    tile_constants,
)


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _selective_scan_kernel(
    xbc: tl.tensor, steps: tl.tensor, decay: tl.tensor, step_bias: tl.tensor, skip: tl.tensor, state: tl.tensor,
    starts: tl.tensor, slots: tl.tensor, snapshot_counts: tl.tensor, snapshot_slots: tl.tensor, out: tl.tensor,
    XBC_ROW: tl.constexpr, STEPS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STEP_MIN: tl.constexpr, STEP_MAX: tl.constexpr,
    LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk, head and WIDTH rows of its state: token by token."""
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    if count <= 0:
        return
    head, n = tl.program_id(1), tl.arange(0, LENGTH_TILE)
    p = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_head, in_state = p < HEAD_DIM, n < STATE_SIZE
    states = state + head * HEAD_DIM * STATE_SIZE + p[:, None] * STATE_SIZE + n[None, :]
    kept = in_head[:, None] & in_state[None, :]
    now = tl.load(states + slot * (HEADS * HEAD_DIM * STATE_SIZE), mask=kept, other=0.0).to(tl.float32)
    rate_of_decay, bias, direct = tl.load(decay + head), tl.load(step_bias + head), tl.load(skip + head)
    source = xbc + start * XBC_ROW + head * HEAD_DIM + p
    shared = xbc + start * XBC_ROW + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE + n
    step_of, to = steps + start * STEPS_ROW + head, out + start * OUT_ROW + head * HEAD_DIM + p
    for token in range(0, count):
        x = tl.load(source + token * XBC_ROW, mask=in_head, other=0.0).to(tl.float32)
        b = tl.load(shared + token * XBC_ROW, mask=in_state, other=0.0).to(tl.float32)
        c = tl.load(shared + token * XBC_ROW + GROUPS * STATE_SIZE, mask=in_state, other=0.0).to(tl.float32)
        step = softplus(tl.load(step_of + token * STEPS_ROW).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, STEP_MIN), STEP_MAX)
        now = now * tl.exp(rate_of_decay * step) + (step * x)[:, None] * b[None, :]
        result = tl.sum(now * c[None, :], axis=1) + direct * x
        tl.store(to + token * OUT_ROW, result.to(out.dtype.element_ty), mask=in_head)
        if token + 1 == cut:
            # What goes on is rounded as what the snapshot holds, so that a sequence may go on from either.
            rounded = now.to(state.dtype.element_ty)
            tl.store(states + target * (HEADS * HEAD_DIM * STATE_SIZE), rounded, mask=kept)
            now = rounded.to(tl.float32)
    tl.store(states + slot * (HEADS * HEAD_DIM * STATE_SIZE), now.to(state.dtype.element_ty), mask=kept)


def selective_scan(
    xbc: Tensor, steps: Tensor, heads: ScanHeads, state: Tensor, recurrence: Recurrence, out: Tensor
) -> None:
    """See `LayerOps.selective_scan`."""
    constants = tile_constants(heads.state_size, heads.head_dim)
    blocks = -(-heads.head_dim // constants["WIDTH"])
    _selective_scan_kernel[(len(recurrence.slots), heads.heads, blocks)](
        xbc, steps, heads.decay, heads.step_bias, heads.skip, state, *chunk_tensors(recurrence), out, xbc.stride(0),
        steps.stride(0), out.stride(0), heads.heads, heads.head_dim, heads.groups, heads.state_size, heads.step_min,
        heads.step_max, **constants,
    )  # fmt: skip
