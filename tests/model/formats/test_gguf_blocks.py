"""Blocks of GGUF files in the engine's packed formats have the numbers of llama.cpp's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from cbatch.kernels.formats import GROUP, INT4, INT4_ZEROS, INT8
from cbatch.model.formats import gguf_blocks
from cbatch.model.formats.gguf_blocks import BLOCKS, block_name, integers_of, packing_of, values_of
from tests.support.gguf_files import Piece, blocks_of

EXACT = [Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.IQ4_NL, Kind.MXFP4]
NEARLY = {Kind.Q4_1: 1e-3, Kind.Q4_K: 2e-3, Kind.IQ4_XS: 1e-3}
"""Errors as a share of the largest number of a group; float16 has 11 bits."""

ROWS, DEPTH = 40, 512


def draw(kind: Kind) -> NDArray[np.uint8]:
    """Rows of blocks of a format, with scales of both signs, and groups whose numbers are all equal."""
    numbers = np.random.default_rng(kind).standard_normal((ROWS, DEPTH), np.float32)
    numbers[3:5] = numbers[3:5, :1]  # which Q4_1 writes with the scale 0
    numbers[5] = 0
    return blocks_of(Piece(kind.name, numbers, lambda found: {}), kind).view(np.uint8)


def test_sizes_are_those_of_the_package() -> None:
    """Guards the table of block sizes, by which every tensor is found."""
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[Kind(kind)] == sizes and block_name(kind) == Kind(kind).name


@pytest.mark.parametrize("kind", [*EXACT, *NEARLY], ids=lambda kind: kind.name)
def test_integers_have_the_numbers_of_the_package(kind: Kind) -> None:
    """Guards the order of nibbles, high bits and 6-bit scales, and what is said to be lost."""
    data, packing = draw(kind), packing_of(kind)
    expected = gguf.quants.dequantize(data, kind)
    assert packing is not None and np.array_equal(values_of(kind, data).numpy(), expected)
    integers = integers_of(kind, data, packing.format)
    assert integers is not None
    assert kind == Kind.MXFP4 or integers.scales.equal(integers.scales.half().float())
    errors = np.abs(integers.values(packing.format).numpy() - expected).reshape(-1, GROUP).max(axis=1)
    largest = np.abs(expected).reshape(-1, GROUP).max(axis=1)
    assert (errors <= NEARLY.get(kind, 0) * largest).all()


def test_narrow_integers_go_to_wider_formats_without_loss() -> None:
    """Guards parts of one matrix in several formats."""
    targets = {Kind.Q4_0: (INT4, INT4_ZEROS, INT8), Kind.IQ4_NL: (INT8,), Kind.MXFP4: (INT8,)}
    for kind in targets:
        data = draw(kind)
        expected = gguf.quants.dequantize(data, kind)
        for target in targets[kind]:
            integers = integers_of(kind, data, target)
            assert integers is not None and np.array_equal(integers.values(target).numpy(), expected)
    assert integers_of(Kind.Q4_1, draw(Kind.Q4_1), INT8) is None
    assert integers_of(Kind.Q6_K, draw(Kind.Q6_K), INT8) is None


@pytest.mark.parametrize("fault", ["_nibbles", "_halves", "_with_minimum"])
def test_wrong_blocks_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards these tests: halves of bytes in turns, scales of the wrong place, or minima of the wrong sign."""
    right = getattr(gguf_blocks, fault)
    wrong = {
        "_nibbles": lambda blocks, place: right(blocks, place).reshape(*blocks.shape[:2], 2, -1).swapaxes(2, 3).reshape(
            *blocks.shape[:2], -1
        ),
        "_halves": lambda blocks, place: right(np.roll(blocks, 1, axis=1), place),
        "_with_minimum": lambda numbers, scales, minima: right(numbers, scales, -minima),
    }  # fmt: skip
    monkeypatch.setattr(gguf_blocks, fault, wrong[fault])
    with pytest.raises(AssertionError):
        test_integers_have_the_numbers_of_the_package(Kind.Q4_K if fault == "_with_minimum" else Kind.Q4_0)
