"""Stores a step's keys and values in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def store_kv(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Stores new_keys [T, kv_heads, key_dim] and new_values by slot; rows with a negative slot are not stored.

    keys, values: [num_blocks, kv_heads, block_size, dim]
    """
    _, heads, block_size, key_dim = keys.shape
    value_dim = values.shape[-1]
    _store_kv_kernel[(len(slots),)](
        keys, values, new_keys, new_values, slots, *new_keys.stride()[:2], *new_values.stride()[:2], HEADS=heads,
        BLOCK_SIZE=block_size, KEY_DIM=key_dim, VALUE_DIM=value_dim, HEADS_TILE=triton.next_power_of_2(heads),
        KEY_TILE=triton.next_power_of_2(key_dim), VALUE_TILE=triton.next_power_of_2(value_dim),
    )  # fmt: skip


@triton.jit
def _store_kv_kernel(
    keys: tl.tensor, values: tl.tensor, new_keys: tl.tensor, new_values: tl.tensor, slots: tl.tensor,
    key_row: tl.tensor, key_head: tl.tensor, value_row: tl.tensor, value_head: tl.tensor, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One program stores one token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, HEADS_TILE)
        there = (slot // BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        column = tl.arange(0, KEY_TILE)
        kept = (head < HEADS)[:, None] & (column < KEY_DIM)[None, :]
        new = tl.load(new_keys + row * key_row + head[:, None] * key_head + column[None, :], mask=kept)
        tl.store(keys + there[:, None] * KEY_DIM + column[None, :], new, mask=kept)
        column = tl.arange(0, VALUE_TILE)
        kept = (head < HEADS)[:, None] & (column < VALUE_DIM)[None, :]
        new = tl.load(new_values + row * value_row + head[:, None] * value_head + column[None, :], mask=kept)
        tl.store(values + there[:, None] * VALUE_DIM + column[None, :], new, mask=kept)
