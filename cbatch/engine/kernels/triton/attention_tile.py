"""What both attention kernels need: the places of tokens in the cache, and attention over one tile of them.

Scores are in base 2: they are multiplied with log2(e), because the hardware computes exp2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How to attend, as in `AttentionBackend.attend`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def arguments(self, query: Tensor) -> dict[str, Any]:
        """Arguments of a kernel. Options that are None are compiled out of it."""
        return {
            "scale": self.scale * LOG2_E,
            "window": self.window or 0,
            "softcap": self.softcap or 1.0,
            "sinks": query if self.sinks is None else self.sinks,
            "HAS_WINDOW": self.window is not None,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_SINKS": self.sinks is not None,
        }


def cache_layout(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, int]:
    """Arguments for the layout of a layer's cache. Tiles are padded to powers of 2 and masked."""
    _, kv_heads, block_size, key_dim = keys.shape
    return {
        "KV_HEADS": kv_heads,
        "GROUP": query.shape[1] // kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": values.shape[-1],
        "KEY_TILE": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_TILE": max(16, triton.next_power_of_2(values.shape[-1])),
    }


@triton.jit
def kv_rows(
    block_ids: tl.tensor, tokens: tl.tensor, there: tl.tensor, head: tl.tensor, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows of the cache, seen as [num_blocks * kv_heads * block_size, dim], that hold tokens of a sequence."""
    page = tl.load(block_ids + tokens // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    return (page * KV_HEADS + head) * BLOCK_SIZE + tokens % BLOCK_SIZE


@triton.jit
def load_kv(
    cache: tl.tensor, rows: tl.tensor, there: tl.tensor, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[tokens, TILE] keys or values; 0 beyond the head's size, and for masked tokens."""
    column = tl.arange(0, TILE)
    place = cache + rows[:, None] * DIM + column[None, :]
    if MASKED:
        return tl.load(place, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
    if DIM != TILE:
        return tl.load(place, mask=(column < DIM)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def scaled_scores(
    q: tl.tensor, k: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """[queries, tokens] scores in base 2."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) is right at both ends, and exp(2x) is exp2 of twice the score in base 2.
        bend = softcap * 1.4426950408889634
        scores = bend * (1.0 - 2.0 / (tl.exp2(2.0 * scores / softcap) + 1.0))
    return scores


@triton.jit
def online_softmax_update(
    scores: tl.tensor, v: tl.tensor, acc: tl.tensor, largest: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """Adds a tile to the online softmax: acc [queries, dim], largest and total [queries]."""
    peak = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet has no largest score to subtract.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(largest - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total
