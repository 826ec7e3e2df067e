"""The device of the tests that run on a GPU if there is one; all others run on the CPU."""

from __future__ import annotations

import torch

HAS_GPU = torch.cuda.is_available() and torch.version.hip is None

DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
"""A test module that has this name, or imports from `tests.support.cuda_model`, is one of them."""

MEMORY_BYTES = 8 * 2**30
"""Most that tests take of a GPU, or half of it if that is less: somebody may be using it."""


def bound_memory() -> None:
    """Lets this process take no more of the GPU than `MEMORY_BYTES`."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(MEMORY_BYTES / total, 0.5), DEVICE)
