"""Chunks of many tokens, tile by tile: what recurrent layers with a decay have in common.

For each token t, a layer adds the outer product of a key k_t and an update u_t to its state S, which decays before:

    S = exp(g_t) * S + k_t outer u_t
    o_t = q_t S

Over a tile of tokens, with the sums G of the logarithms g up to and with a token, that is three products of matrices
(Dao and Gu, https://arxiv.org/abs/2405.21060; Yang et al., https://arxiv.org/abs/2412.06464):

    o_t = exp(G_t) * q_t S + sum over i <= t of exp(G_t - G_i) * (q_t k_i) * u_i
    S = exp(G_last) * S + sum over i of exp(G_last - G_i) * k_i outer u_i

Tiles are counted from the first token of a chunk. The engine cuts prompts at multiples of 64 tokens, so not a bit
depends on where it has cut one; a chunk that begins elsewhere has tiles of its own. A tile with a snapshot in its
middle becomes two. The state is rounded to its type after each tile, as it is after each chunk.

The last tokens of a chunk, if they are `SHORT` or fewer, are left to the kernels that go token by token, which run
afterwards: a token that is decoded beside chunks has the same bits as without them.

Products are exact to float32, of 16-bit queries and keys with states of float32, by the matrix units. Models of
float32, and chips without such units, go token by token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Recurrence
from cbatch.kernels.triton.attention_tile import LAUNCH, launch_options, power_of_2

TILE = 16
"""Larger ones take more registers than a thread has."""
SHORT = 8
"""Tokens at the end of a chunk that do not take a tile, at most."""
_STATES = 4096
"""Numbers of a state that a program holds that goes token by token: 32 registers of each of 128 threads."""

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


def takes_tiles(dtype: torch.dtype, capability: int) -> bool:
    """Whether long chunks of queries and keys of a type go tile by tile.  capability: of the chip, 90 for 9.0"""
    return dtype.itemsize == 2 and capability >= 80


def token_constants(length: int, width: int, *, tiles: bool) -> dict[str, Any]:
    """For kernels that go token by token: WIDTH of a head's `width` states, each `length` long, in a program.

    tiles: whether there are kernels that go tile by tile
    """
    padded = power_of_2(length)
    columns = min(max(_STATES // padded, 1), power_of_2(width))
    return {
        "LENGTH_TILE": padded, "WIDTH": columns, "TILE": TILE if tiles else 0, "SHORT": SHORT,
        **launch_options(padded * columns // 32),
    }  # fmt: skip


def tile_constants(length: int, width: int, capability: int) -> dict[str, Any]:
    """Likewise for kernels that go tile by tile.

    The matrix units of 9.0 and 10.0 read the longer operands from shared memory; others take all from registers.
    """
    padded = max(power_of_2(length), 16)
    reads_shared = 90 <= capability < 120
    columns = min(32 if reads_shared else 16, power_of_2(width))
    return {
        "LENGTH_TILE": padded, "WIDTH": max(columns, 16), "TILE": TILE, "SHORT": SHORT,
        "num_warps": 4 if padded <= 128 and reads_shared else 8, "num_stages": 1, **LAUNCH,
    }  # fmt: skip


@triton.jit
def tiled_tokens(count: tl.tensor, TILE: tl.constexpr, SHORT: tl.constexpr) -> tl.tensor:
    """How many of a chunk's first tokens go tile by tile; none if TILE is 0."""
    if TILE == 0:
        return 0 * count
    rest = count % TILE
    return tl.where(rest <= SHORT, count - rest, count)


@triton.jit
def num_tiles(count: tl.tensor, cut: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """How many tiles there are of `count` tokens with a snapshot after `cut` tokens."""
    return tl.cdiv(count, TILE) + ((cut < count) & (cut % TILE > 0)).to(tl.int32)


@triton.jit
def tile_bounds(number: tl.tensor, count: tl.tensor, cut: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """First token of a tile, and the one after its last."""
    is_cut = (cut < count) & (cut % TILE > 0)
    is_after = is_cut & (number > cut // TILE)
    begin = tl.where(is_after, number - 1, number) * TILE
    end = tl.minimum(begin + TILE, count)
    end = tl.where(is_cut & (number == cut // TILE), cut, end)
    return tl.where(is_after & (number == cut // TILE + 1), cut, begin), end


@triton.jit
def find_tile(starts: tl.tensor, chunks: tl.tensor, tile: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The chunk of a tile, and the tile's number in it, in a list with room for all tiles that chunks may have.

    A chunk that begins at row r has tiles from number r // TILE + 2 * chunk on: one may not be full, and one is cut.
    """
    begun, first = 0, 0
    for base in range(0, chunks, 128):
        chunk = base + tl.arange(0, 128)
        start = tl.load(starts + chunk, mask=chunk < chunks, other=0)
        is_begun = (chunk < chunks) & (start // TILE + 2 * chunk <= tile)
        begun += tl.sum(is_begun.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(is_begun, start // TILE + 2 * chunk, 0), 0))
    return begun - 1, tile - first


@triton.jit
def decay_between(total: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """[t, i] exp(G_t - G_i) for tokens i up to t, else 0.  total: [TILE] G"""
    t = tl.arange(0, TILE)
    return tl.exp(tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _in_parts(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Numbers of float32 as sums of three of a 16-bit type; those of float16 must be below 65520."""
    upper = x.to(like.dtype)
    rest = x - upper.to(tl.float32)
    middle = rest.to(like.dtype)
    return upper, middle, (rest - middle.to(tl.float32)).to(like.dtype)


@triton.jit
def dot_in_parts(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """a times b plus total, with 16-bit numbers a, and numbers b of float32."""
    upper, middle, lower = _in_parts(b, a)
    return tl.dot(a, upper, tl.dot(a, middle, tl.dot(a, lower, total)))


@triton.jit
def two_dots_in_parts(a: tl.tensor, b: tl.tensor, x: tl.tensor, total: tl.tensor) -> tl.tensor:
    """a times x, and b times x, both plus total. Two calls would hold all parts of x in registers."""
    upper, middle, lower = _in_parts(x, a)
    left, right = tl.dot(a, lower, total), tl.dot(b, lower, total)
    left, right = tl.dot(a, middle, left), tl.dot(b, middle, right)
    return tl.dot(a, upper, left), tl.dot(b, upper, right)
