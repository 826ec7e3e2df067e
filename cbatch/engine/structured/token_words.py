"""Sets of tokens as words of 32 bits: bit `t % 32` of word `t // 32` says whether token `t` is in the set.

llguidance writes its masks so, and kernels read them so. Bits past the vocabulary are 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def num_words(vocab_size: int) -> int:
    """Words of a set over so many tokens."""
    return -(-vocab_size // 32)


def all_tokens(vocab_size: int) -> NDArray[np.int32]:
    """The set of all tokens, [num_words]."""
    words = np.full(num_words(vocab_size), -1, np.int32)
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    return words


def words_of(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """The set of some tokens, [num_words]; ids past the vocabulary are left out."""
    bits = np.zeros(32 * num_words(vocab_size), np.bool_)
    ids = np.array(list(token_ids), np.int64)
    bits[ids[ids < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def to_bools(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Sets [G, num_words] as booleans [G, vocab_size]."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
