"""The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464).

`GatedDelta` in `models/programs/program.py` has the formulas. Queries and keys are divided by their lengths on the way.
States may be of any type; what is computed is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbatch.engine.kernels.layer_ops import DeltaHeads, Recurrence
from cbatch.engine.kernels.triton.recurrence.chunk import (
    CHUNK_TENSORS,
    chunk_tensors,
    read_chunk,
    softplus,
    tile_constants,
)


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    """A vector divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _gated_delta_kernel(
    qkv: tl.tensor, controls: tl.tensor, decay: tl.tensor, decay_bias: tl.tensor, state: tl.tensor, starts: tl.tensor,
    slots: tl.tensor, snapshot_counts: tl.tensor, snapshot_slots: tl.tensor, out: tl.tensor, QKV_ROW: tl.constexpr,
    CONTROLS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk, value head and WIDTH columns of its state: token by token."""
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    if count <= 0:
        return
    head, k = tl.program_id(1), tl.arange(0, LENGTH_TILE)
    v = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    is_key, is_value = k < KEY_DIM, v < VALUE_DIM
    states = state + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    kept = is_key[:, None] & is_value[None, :]
    now = tl.load(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM), mask=kept, other=0.0).to(tl.float32)
    rate_of_decay, bias = tl.load(decay + head), tl.load(decay_bias + head)
    query = qkv + start * QKV_ROW + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + k
    value = qkv + start * QKV_ROW + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    control, to = controls + start * CONTROLS_ROW + head, out + start * OUT_ROW + head * VALUE_DIM + v
    for token in range(0, count):
        q = _unit(tl.load(query + token * QKV_ROW, mask=is_key, other=0.0).to(tl.float32)) * (KEY_DIM**-0.5)
        key = _unit(tl.load(query + token * QKV_ROW + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32))
        new = tl.load(value + token * QKV_ROW, mask=is_value, other=0.0).to(tl.float32)
        b = tl.load(control + token * CONTROLS_ROW).to(tl.float32)
        a = tl.load(control + token * CONTROLS_ROW + VALUE_HEADS).to(tl.float32)
        now *= tl.exp(rate_of_decay * softplus(a + bias))
        error = new - tl.sum(now * key[:, None], axis=0)
        now += key[:, None] * (tl.sigmoid(b) * error)[None, :]
        result = tl.sum(now * q[:, None], axis=0)
        tl.store(to + token * OUT_ROW, result.to(out.dtype.element_ty), mask=is_value)
        if token + 1 == cut:
            # What goes on is rounded as what the snapshot holds, so that a sequence may go on from either.
            rounded = now.to(state.dtype.element_ty)
            tl.store(states + target * (VALUE_HEADS * KEY_DIM * VALUE_DIM), rounded, mask=kept)
            now = rounded.to(tl.float32)
    tl.store(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM), now.to(state.dtype.element_ty), mask=kept)


def gated_delta(
    qkv: Tensor, controls: Tensor, heads: DeltaHeads, state: Tensor, recurrence: Recurrence, out: Tensor
) -> None:
    """See `LayerOps.gated_delta`."""
    constants = tile_constants(heads.key_dim, heads.value_dim)
    blocks = -(-heads.value_dim // constants["WIDTH"])
    _gated_delta_kernel[(len(recurrence.slots), heads.value_heads, blocks)](
        qkv, controls, heads.decay, heads.decay_bias, state, *chunk_tensors(recurrence), out, qkv.stride(0),
        controls.stride(0), out.stride(0), heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim,
        **constants,
    )  # fmt: skip
