"""Recurrent layers by torch alone, token by token: the reference of the kernels, and what replaces them.

The host reads where the chunks of a step begin, so such steps cannot be captured as graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.layer_ops import Convolution, DeltaHeads, Recurrence, ScanHeads


class _Piece(NamedTuple):
    """Rows `start .. stop-1` of a step, a chunk or a part of one, and the slot to which its state is copied after."""

    start: int
    stop: int
    slot: int
    copy_to: int


def _pieces(recurrence: Recurrence) -> Iterator[_Piece]:
    starts, *columns = (
        column.tolist()
        for column in (recurrence.starts, recurrence.slots, recurrence.snapshot_counts, recurrence.snapshot_slots)
    )
    for start, stop, slot, count, copy_to in zip(starts, starts[1:], *columns, strict=False):
        if slot < 0:
            continue
        between = start + count if copy_to >= 0 else stop
        if between > start:
            yield _Piece(start, between, slot, copy_to)
        if between < stop:
            yield _Piece(between, stop, slot, -1)


def convolve(source: Tensor, convolution: Convolution, state: Tensor, recurrence: Recurrence) -> Tensor:
    """[T, channels] float32 of the source [T, channels]; see `LayerOps.convolve`."""
    out = source.new_zeros(source.shape, dtype=torch.float32)
    channels, kernel = convolution.weight.shape
    for piece in _pieces(recurrence):
        new = source[piece.start : piece.stop].float().T
        seen = torch.cat([state[piece.slot].float(), new], dim=1)
        found = functional.conv1d(seen[None], convolution.weight[:, None], convolution.bias, groups=channels)[0].T
        out[piece.start : piece.stop] = functional.silu(found) if convolution.activation == "silu" else found
        state[piece.slot] = seen[:, seen.shape[1] - (kernel - 1) :]
        _copy(state, piece)
    return out


def gated_delta(qkv: Tensor, controls: Tensor, heads: DeltaHeads, state: Tensor, recurrence: Recurrence) -> Tensor:
    """[T, value_heads, value_dim] float32; see `LayerOps.gated_delta`."""
    widths = [heads.key_heads * heads.key_dim] * 2 + [heads.value_heads * heads.value_dim]
    query, key, value = (part.float() for part in torch.split(qkv, widths, dim=1))
    query, key = (_unit(part.reshape(len(qkv), heads.key_heads, -1)) for part in (query, key))
    query, key = (part.repeat_interleave(heads.value_heads // heads.key_heads, dim=1) for part in (query, key))
    query, value = query * heads.key_dim**-0.5, value.reshape(len(qkv), heads.value_heads, -1)
    b, a = controls.float().chunk(2, dim=1)
    rate, decay = torch.sigmoid(b), (heads.decay * functional.softplus(a + heads.decay_bias)).exp()
    out = torch.zeros_like(value)
    for piece in _pieces(recurrence):
        now = state[piece.slot].float()
        for row in range(piece.start, piece.stop):
            now = now * decay[row, :, None, None]
            error = value[row] - torch.einsum("hkv,hk->hv", now, key[row])
            now = now + key[row, :, :, None] * (rate[row, :, None] * error)[:, None, :]
            out[row] = torch.einsum("hkv,hk->hv", now, query[row])
        state[piece.slot] = now
        _copy(state, piece)
    return out


def selective_scan(xbc: Tensor, steps: Tensor, heads: ScanHeads, state: Tensor, recurrence: Recurrence) -> Tensor:
    """[T, heads, head_dim] float32; see `LayerOps.selective_scan`."""
    inner, shared = heads.heads * heads.head_dim, heads.groups * heads.state_size
    x, b, c = (part.float() for part in torch.split(xbc, [inner, shared, shared], dim=1))
    x = x.reshape(len(xbc), heads.heads, -1)
    b, c = (part.reshape(len(xbc), heads.groups, -1) for part in (b, c))
    b, c = (part.repeat_interleave(heads.heads // heads.groups, dim=1) for part in (b, c))
    step = functional.softplus(steps.float() + heads.step_bias).clamp(heads.step_min, heads.step_max)
    decay, out = (heads.decay * step).exp(), heads.skip[:, None] * x
    for piece in _pieces(recurrence):
        now = state[piece.slot].float()
        for row in range(piece.start, piece.stop):
            now = now * decay[row, :, None, None] + (step[row, :, None] * x[row])[:, :, None] * b[row, :, None, :]
            out[row] += torch.einsum("hps,hs->hp", now, c[row])
        state[piece.slot] = now
        _copy(state, piece)
    return out


def _unit(x: Tensor) -> Tensor:
    """The last dimension divided by its length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _copy(state: Tensor, piece: _Piece) -> None:
    if piece.copy_to >= 0:
        state[piece.copy_to] = state[piece.slot]
