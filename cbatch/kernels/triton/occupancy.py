"""How many programs of a compiled kernel a multiprocessor runs at once. Needs neither Triton nor a GPU.

Sources: the tables “Technical Specifications per Compute Capability” of the CUDA C++ Programming Guide, and the CUDA
occupancy calculator for how registers and shared memory are handed out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cbatch.runtime.device import is_nvidia

REGISTERS_OF_A_WARP = 256
"""Registers are handed out to warps in multiples of it."""
SHARED_UNIT = 128
"""Bytes; shared memory is handed out to programs in multiples of it."""


class DeviceLimits(NamedTuple):
    """The limits of a GPU; shared memory in bytes.

    capability       ten times the major version, plus the minor one
    shared           of a multiprocessor
    shared_of_block  that a program may have
    reserved         that each program takes in addition
    registers, warps, programs  at most, of a multiprocessor
    multiprocessors  of the GPU
    """

    capability: int
    shared: int
    shared_of_block: int
    reserved: int
    warps: int
    programs: int
    registers: int = 65536
    multiprocessors: int = 1


KIB = 1024
CHIPS = {
    chip.capability: chip
    for chip in (
        DeviceLimits(75, 64 * KIB, 64 * KIB, 0, 32, 16),
        DeviceLimits(80, 164 * KIB, 163 * KIB, KIB, 64, 32),
        DeviceLimits(86, 100 * KIB, 99 * KIB, KIB, 48, 16),
        DeviceLimits(89, 100 * KIB, 99 * KIB, KIB, 48, 24),
        DeviceLimits(90, 228 * KIB, 227 * KIB, KIB, 64, 32),
        DeviceLimits(100, 228 * KIB, 227 * KIB, KIB, 64, 32),
        DeviceLimits(120, 100 * KIB, 99 * KIB, KIB, 48, 24),
    )
}
"""Limits by compute capability, for one multiprocessor."""


def limits_of(properties: Any) -> DeviceLimits:
    """The limits of a device, from `torch.cuda.get_device_properties`."""
    capability = properties.major * 10 + properties.minor
    reserved = KIB if capability >= 80 else 0
    shared = properties.shared_memory_per_multiprocessor
    warps = properties.max_threads_per_multi_processor // 32
    # torch does not tell how many programs there may be; 16 is the least of any chip since 7.5.
    programs = CHIPS[capability].programs if capability in CHIPS else 16
    count = properties.multi_processor_count
    return DeviceLimits(capability, shared, shared - reserved, reserved, warps, programs, multiprocessors=count)


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a device; where kernels run in Triton's interpreter, those of two multiprocessors of an H100."""
    if is_nvidia(device):
        return limits_of(torch.cuda.get_device_properties(device))
    return CHIPS[90]._replace(multiprocessors=2)


def resident_programs(registers: int, shared: int, warps: int, limits: DeviceLimits) -> int:
    """How many programs a multiprocessor runs at once; 0 if not even one fits.

    registers  of a thread
    shared     bytes of shared memory of a program
    warps      of a program
    """
    if shared > limits.shared_of_block:
        return 0
    of_warp = -(-registers * 32 // REGISTERS_OF_A_WARP) * REGISTERS_OF_A_WARP
    # Each of the four parts of a multiprocessor has registers of its own.
    by_registers = limits.registers // 4 // of_warp * 4 // warps if registers else limits.programs
    taken = -(-shared // SHARED_UNIT) * SHARED_UNIT + limits.reserved
    by_shared = limits.shared // taken if taken else limits.programs
    return min(limits.programs, limits.warps // warps, by_registers, by_shared)
