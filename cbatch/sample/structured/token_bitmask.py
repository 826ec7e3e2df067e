"""Token bitmasks: sets of tokens as integers of 32 bits.

Bit `t % 32` of integer `t // 32` says whether token `t` is in the set. llguidance writes its masks so, and kernels read
them so. Bits past the vocabulary are 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def bitmask_size(vocab_size: int) -> int:
    """Integers of the bitmask of a vocabulary."""
    return -(-vocab_size // 32)


def full_bitmask(vocab_size: int) -> NDArray[np.int32]:
    """The set of all tokens, [bitmask_size]."""
    bitmask = np.full(bitmask_size(vocab_size), -1, np.int32)
    if vocab_size % 32:
        bitmask[-1] = (1 << vocab_size % 32) - 1
    return bitmask


def bitmask_of(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """The set of some tokens, [bitmask_size]; ids past the vocabulary are left out."""
    bits = np.zeros(32 * bitmask_size(vocab_size), np.bool_)
    ids = np.array(list(token_ids), np.int64)
    bits[ids[ids < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def to_bools(bitmasks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Sets [G, bitmask_size] as booleans [G, vocab_size]."""
    bits = np.unpackbits(bitmasks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
