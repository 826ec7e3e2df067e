"""A KV cache of one byte a number: its conversions, every kernel that writes or reads it, and the engine around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from cbatch.attention.base import AttentionBackend
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.registry import check_kv_dtype
from cbatch.attention.triton import TritonAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.kernels.triton.attention_decode import DecodeTuning
from cbatch.kernels.triton.attention_prefill import PrefillTuning
from cbatch.kernels.triton.conversion import from_fp8, to_fp8
from cbatch.runtime.kv_cache import FP8, FP8_MAX, LayerShape, as_stored
from tests.attention.test_triton_attention import CASES, CPU, DEVICE, Sequences
from tests.support.ptx import emulated_ptx, needs_interpreter

pytestmark = pytest.mark.kernels


@triton.jit
def _convert(source: Any, target: Any, COUNT: tl.constexpr, BACK: tl.constexpr) -> None:
    place = tl.arange(0, COUNT)
    if BACK:
        tl.store(target + place, from_fp8(tl.load(source + place), target.dtype.element_ty))
    else:
        tl.store(target + place, to_fp8(tl.load(source + place)))


def converted(source: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty(len(source), dtype=dtype, device=DEVICE)
    _convert[(1,)](source.to(DEVICE), target, len(source), source.dtype == torch.uint8)
    return target.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_code_is_read_exactly(dtype: torch.dtype) -> None:
    """Guards reading by integers: all 256 codes, subnormal numbers and NaN among them, as torch converts them."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(FP8).to(dtype)
    assert expected.isnan().sum() == 2
    assert torch.equal(converted(codes, dtype).nan_to_num(9e3), expected.nan_to_num(9e3))


@needs_interpreter
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_is_read_exactly_by_ptx(dtype: torch.dtype, capability: int) -> None:
    """Guards what compiled kernels convert by, with a chip's type of FP8 and without one."""
    with emulated_ptx(capability):
        test_every_code_is_read_exactly(dtype)


def test_numbers_are_rounded_as_torch_does() -> None:
    """Guards writing: each number of FP8, each middle of two and its neighbours, what is too large, and NaN."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    up = torch.nextafter(middles, torch.tensor(torch.inf))
    edges = torch.tensor([1e-30, 2.0**-10, 2.0**-10 * 1.001, 448.0, 463.9, 464.1, 1e9, torch.inf, torch.nan, 0.0])
    source = torch.cat([numbers, middles, up, torch.nextafter(middles, torch.tensor(0.0)), edges])
    source = torch.cat([source, -source, torch.zeros(2048 - 2 * len(source))])
    expected = as_stored(source, FP8).view(torch.uint8)
    found = converted(source, torch.uint8)
    same = (found == expected) | (source.isnan() & ((found & 0x7F) == 0x7F))
    assert same.all(), source[~same]
    assert torch.equal(as_stored(torch.tensor([500.0, -1e9]), FP8).float(), torch.tensor([FP8_MAX, -FP8_MAX]))


@needs_interpreter
def test_numbers_are_rounded_by_ptx_as_torch_does() -> None:
    """Guards the order of four numbers that a chip's type of FP8 rounds at once."""
    with emulated_ptx(90):
        test_numbers_are_rounded_as_torch_does()


def stored_and_attended(attention: AttentionBackend, sequences: Sequences, dtype: torch.dtype) -> Tensor:
    """Attention of a decode row, a narrow, a wide and a long chunk over a cache in which nothing else was written."""
    device = DEVICE if attention.name == "triton" else CPU
    shapes = attention.block_shapes(sequences.case.layer, sequences.case.block_size, FP8)
    cache = tuple(torch.full((sequences.num_blocks, *shape), torch.nan).to(FP8).to(device) for shape in shapes)
    chunks = [(0, 69, 70), (1, 66, 69), (2, 41, 61), (3, 0, 20)]
    everything = [(one, 0, length) for one, length in enumerate(sequences.lengths)]
    sequences.write(attention, cache, everything, dtype)  # type: ignore[arg-type]
    metadata = attention.prepare(sequences.batch(chunks, device), sequences.case.block_size)
    query = sequences.rows(sequences.query, chunks, dtype, device)
    return attention.attend(query, *cache, metadata, **sequences.case.options).cpu()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_equals_the_reference(dtype: torch.dtype) -> None:
    """Guards the kernels that write and read the cache: they add nothing to its rounding, and see no NaN in it."""
    check_attention(dtype)


@needs_interpreter
@pytest.mark.parametrize("capability", [80, 90])
def test_attention_by_ptx_equals_the_reference(capability: int) -> None:
    """Guards the order in which tiles of keys and values become numbers, four bytes at once."""
    with emulated_ptx(capability):
        check_attention(torch.float16)


def check_attention(dtype: torch.dtype) -> None:
    sequences = Sequences(replace(CASES["window"], window=50), [70, 69, 61, 20], dtype)
    backend = TritonAttention(
        DEVICE, DecodeTuning(split=16, tile_bytes=1024), PrefillTuning(rows=32, tokens=16, warps=4), kv_dtype=FP8
    )
    # Both store the same numbers; the reference computes in float32.
    expected = stored_and_attended(ReferenceAttention(FP8), sequences, torch.float32)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    found = stored_and_attended(backend, sequences, dtype)
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_what_has_no_fp8_cache_says_so() -> None:
    """Guards the options: the CPU's kernels are refused with what helps, and so is a type that does not exist."""
    with pytest.raises(ConfigError, match="--attention reference"):
        check_kv_dtype("fp8", "auto", CPU)
    with pytest.raises(ConfigError, match="auto, fp8 or u8"):
        check_kv_dtype("int3", "auto", CPU)
    with pytest.raises(ConfigError, match="--attention reference"):
        SteppingEngine(EngineConfig(kv_dtype="fp8", device="cpu"))
    assert check_kv_dtype("fp8", "reference", CPU) == check_kv_dtype("fp8", "auto", torch.device("cuda")) == FP8
    assert check_kv_dtype("auto", "auto", CPU) is None
    assert LayerShape(2, 64, 64).bytes_per_token(FP8) == 256
