"""How many programs a GPU runs at once, and what sizes of tiles it gets. Neither needs a GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from cbatch.kernels.triton.occupancy import CHIPS, KIB, DeviceLimits, limits_of, resident_programs


@pytest.mark.parametrize(
    ("chip", "registers", "shared", "warps", "expected"),
    [
        (80, 255, 0, 8, 1),  # 8192 registers a warp, 2 warps in each of 4 parts
        (90, 168, 0, 4, 3),  # 5376 registers a warp, 3 warps in each part: 12 of the 12.19 that fit in all
        (90, 32, 0, 4, 16),  # by warps
        (75, 32, 0, 4, 8),  # by warps, of which this chip has half
        (90, 128, 64 * KIB, 4, 3),  # 65 KiB each of 228
        (90, 64, 75 * KIB, 4, 3),  # 76 KiB each: 228 exactly
        (90, 64, 75 * KIB + 1, 4, 2),
        (86, 64, 48 * KIB, 4, 2),
        (75, 64, 32 * KIB, 4, 2),  # nothing is reserved
        (89, 64, 32 * KIB, 4, 3),
        (80, 32, 32 * KIB, 1, 4),
        (86, 16, 0, 1, 16),  # by programs
        (120, 64, 99 * KIB, 4, 1),
        (120, 64, 99 * KIB + 1, 4, 0),
        (100, 64, 227 * KIB, 8, 1),
        (80, 0, 0, 32, 2),
    ],
)
def test_resident_programs(chip: int, registers: int, shared: int, warps: int, expected: int) -> None:
    """Guards the arithmetic against known chips: registers, shared memory, warps or programs are the limit."""
    assert resident_programs(registers, shared, warps, CHIPS[chip]) == expected


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: str(chip.capability))
def test_limits_are_read_from_the_device(chip: DeviceLimits) -> None:
    """Guards what torch tells about a device against the table, and a chip that the table does not have."""
    properties = SimpleNamespace(
        major=chip.capability // 10,
        minor=chip.capability % 10,
        shared_memory_per_multiprocessor=chip.shared,
        max_threads_per_multi_processor=chip.warps * 32,
        multi_processor_count=70,
    )
    assert limits_of(properties) == chip._replace(multiprocessors=70)
    properties.minor = 3
    assert limits_of(properties).programs == 16


def test_the_grid_is_what_the_device_runs_at_once() -> None:
    """Guards decode launches against programs that wait for others, and against idle multiprocessors."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from cbatch.kernels.triton.attention_decode import DecodeGrid

    grid = DecodeGrid(CHIPS[90]._replace(multiprocessors=132))
    assert grid.programs("small") == 2 * 132
    grid.launched("small", None)  # Triton's interpreter
    assert grid.programs("small") == 2 * 132
    for variant, registers, shared in (("small", 96, 40 * KIB), ("large", 255, 100 * KIB)):
        grid.launched(variant, SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=shared, num_warps=4)))
    assert grid.programs("small") == 5 * 132 and grid.programs("large") == 2 * 132


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: str(chip.capability))
@pytest.mark.parametrize("head", [64, 128, 256])
def test_prefill_tiles_fit_the_chip(chip: DeviceLimits, head: int) -> None:
    """Guards chips with little shared memory, and those on which sums of large heads overflow the registers."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from cbatch.kernels.triton.attention_prefill import PrefillTuning

    for dtype, cache_dtype in itertools.product((torch.bfloat16, torch.float32), (None, torch.uint8)):
        tuning = PrefillTuning().fitted(head, dtype, cache_dtype or dtype, 4, chip)
        of_thread = head * tuning.rows / (32 * tuning.warps)
        # Two tiles of keys and of values; queries too where matrix units read them from shared memory.
        tokens = 4 * tuning.tokens + (tuning.rows if chip.capability in (90, 100) else 0)
        assert tokens * head * dtype.itemsize <= chip.shared_of_block
        # Of 255 registers, sums of float32 and queries may take half.
        if chip.capability not in (90, 100):
            assert of_thread * (1 + dtype.itemsize / 4) <= 128
    assert PrefillTuning().fitted(head, torch.bfloat16, torch.bfloat16, 40, chip).rows >= 64


def test_decode_tiles_leave_room_for_two_programs() -> None:
    """Guards chips of 64 and 100 KiB: with tiles of 16 KiB a multiprocessor would run one program of four warps."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from cbatch.kernels.triton.attention_decode import DecodeTuning

    for chip in CHIPS.values():
        shared = 9 * DecodeTuning.for_chip(chip).tile_bytes // 2  # two tiles of keys and values, and half a tile
        assert resident_programs(0, shared, 4, chip) >= (1 if chip.capability == 75 else 2)
