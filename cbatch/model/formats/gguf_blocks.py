"""The blocks that numbers lie in, in a GGUF file: as integers for the engine's packed formats, or as numbers.

| in the file | bits | packed as | bits | what is lost |
|---|---:|---|---:|---|
| Q8_0, Q5_0 | 8.5, 5.5 | int8 | 8.5 | nothing |
| Q4_0 | 4.5 | int4 | 4.5 | nothing |
| MXFP4 | 4.25 | mxfp4 | 4.5 | nothing |
| IQ4_NL | 4.5 | iq4_nl | 4.5 | nothing |
| IQ4_XS | 4.25 | iq4_nl | 4.5 | scales are rounded to float16 |
| Q4_1, Q4_K | 5, 4.5 | int4_zeros | 5 | scales and zero points are rounded to float16 |
| all others with fewer than 8.5 bits | | int8 | 8.5 | numbers are rounded to 8 bits, in groups of 32 |

Numbers of all formats are those of the `gguf` package, which is llama.cpp's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels import formats as packed
from cbatch.kernels.formats import GROUP, INT4, INT4_ZEROS, INT8, Integers
from cbatch.model.stored import Packing

F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, IQ4_NL, IQ4_XS, BF16, MXFP4 = 0, 1, 2, 3, 6, 8, 12, 20, 23, 30, 39

_TYPES = {
    F32: ("F32", 1, 4), F16: ("F16", 1, 2), Q4_0: ("Q4_0", 32, 18), Q4_1: ("Q4_1", 32, 20), Q5_0: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), Q8_0: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    Q4_K: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), IQ4_NL: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), IQ4_XS: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), BF16: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), MXFP4: ("MXFP4", 32, 17),
}  # fmt: skip
"""Number of a format in files: its name, the numbers of a block, and its bytes."""

BLOCKS = {kind: (numbers, size) for kind, (_, numbers, size) in _TYPES.items()}
"""Numbers and bytes of a block of each format that is read."""

FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
"""Formats that hold numbers as they are."""

_LARGEST_ZERO = 2.0**15


def block_name(kind: int) -> str:
    return _TYPES[kind][0] if kind in _TYPES else str(kind)


def packing_of(kind: int) -> Packing | None:
    """How a block type is packed; None for numbers as they are."""
    if kind in FLOATS:
        return None
    return Packing(_READERS[kind][0] if kind in _READERS else INT8)


def is_exact(kind: int) -> bool:
    """Whether a block type is packed with the integers that it has."""
    return kind in FLOATS or kind in _READERS


def values_of(kind: int, data: NDArray[np.uint8]) -> Tensor:
    """Rows of blocks [rows, bytes] as numbers [rows, depth]; float32, or as they are stored."""
    if kind in FLOATS:
        return torch.from_numpy(np.array(data)).view(FLOATS[kind])
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged file may have any scale
        return torch.from_numpy(dequantize(np.ascontiguousarray(data), GGMLQuantizationType(kind)))


def integers_of(kind: int, data: NDArray[np.uint8], target: int) -> Integers | None:
    """Rows of blocks [rows, bytes] in a packed format; None if they do not go there as they are."""
    if kind not in _READERS:
        return None
    own, read = _READERS[kind]
    with np.errstate(all="ignore"):
        found = read(np.ascontiguousarray(data).reshape(len(data), -1, BLOCKS[kind][1]))
    return found.widened(own, target)


Blocks = NDArray[np.uint8]
"""[rows, blocks, bytes of a block]"""


def as_half(numbers: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Rounded to what float16 has."""
    with np.errstate(all="ignore"):  # a damaged file may have any scale
        return numbers.astype(np.float16).astype(np.float32)


def _halves(blocks: Blocks, place: int) -> NDArray[np.float32]:
    """The float16 of each block at a byte of it, as float32 [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(blocks: Blocks, place: int) -> NDArray[np.uint8]:
    """[rows, blocks, 32] of 16 bytes each, all low halves first."""
    packed = blocks[..., place : place + GROUP // 2]
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _flat(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers.reshape(len(numbers), -1)


def _q8_0(blocks: Blocks) -> Integers:
    return Integers.of_arrays(_flat(blocks[..., 2:].view(np.int8)), _halves(blocks, 0))


def _q4_0(blocks: Blocks) -> Integers:
    """Also IQ4_NL, whose integers are places of levels."""
    return Integers.of_arrays(_flat(_nibbles(blocks, 2)), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> Integers:
    return _with_minimum(_nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Blocks) -> Integers:
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    numbers = (_nibbles(blocks, 6) | high << 4).astype(np.int8) - 16
    return Integers.of_arrays(_flat(numbers), _halves(blocks, 0))


def _mxfp4(blocks: Blocks) -> Integers:
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
    return Integers.of_arrays(_flat(_nibbles(blocks, 1)), scales)


def _iq4_xs(blocks: Blocks) -> Integers:
    """Blocks of 8 groups, whose scales have 6 bits: 2 of each in the first bytes, 4 in the next ones."""
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    packed = blocks[..., 4:8, None]
    low = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(*blocks.shape[:2], 8)
    steps = (low | (high & 3).astype(np.uint8) << 4).astype(np.int8) - 32
    groups = blocks[..., 8:].reshape(len(blocks), -1, GROUP // 2)
    scales = _halves(blocks, 0)[..., None] * steps
    return Integers.of_arrays(_flat(_nibbles(groups, 0)), as_half(_flat(scales)))


def _q4_k(blocks: Blocks) -> Integers:
    """Blocks of 8 groups, whose scales and minima have 6 bits, in 12 bytes."""
    first, second, third = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    steps = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=-1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, GROUP)
    numbers = np.stack([pairs & 15, pairs >> 4], axis=3).reshape(len(blocks), -1, GROUP)
    scales, least = (_flat(_halves(blocks, at)[..., None] * part) for at, part in ((0, steps), (2, minima)))
    return _with_minimum(numbers, scales, -least)


def _with_minimum(numbers: NDArray[np.uint8], scales: NDArray[np.float32], minima: NDArray[np.float32]) -> Integers:
    """Groups [rows, groups, 32] of scale * number + minimum as scale * (number - zero point).

    A group whose zero point would be too large has one number only, as far as float16 tells: -minimum * (0 - 1).
    """
    scales = as_half(scales)
    zeros = -minima / scales
    is_flat = ~(np.abs(zeros) <= _LARGEST_ZERO) & (minima != 0)
    zeros = np.where(is_flat, 1, np.where(scales == 0, 0, zeros))
    scales = np.where(is_flat, -minima, scales)
    return Integers.of_arrays(_flat(np.where(is_flat[..., None], 0, numbers)), as_half(scales), as_half(zeros))


_READERS: dict[int, tuple[int, Callable[[Blocks], Integers]]] = {
    Q8_0: (INT8, _q8_0), Q5_0: (INT8, _q5_0), IQ4_NL: (packed.IQ4_NL, _q4_0), IQ4_XS: (packed.IQ4_NL, _iq4_xs),
    MXFP4: (packed.MXFP4, _mxfp4), Q4_0: (INT4, _q4_0), Q4_1: (INT4_ZEROS, _q4_1), Q4_K: (INT4_ZEROS, _q4_k),
}  # fmt: skip
