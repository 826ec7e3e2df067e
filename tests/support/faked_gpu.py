"""Pretends that torch finds a GPU, to see what tests do on such a machine.

`pytest -p tests.support.faked_gpu -m "not gpu"` runs all tests that a GPU must not change: they pass as they do without
one. Whatever takes the GPU all the same fails, as there is none. The tests that run on a GPU can only be collected.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

GIB = 2**30

torch.cuda.is_available = lambda: True
torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_name = lambda *_: "Fake GPU"
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
    name="Fake GPU", total_memory=80 * GIB, multi_processor_count=132, major=9, minor=0
)
# What transformers asks of a GPU when its continuous batching computes on the CPU.
torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None
torch.cuda.mem_get_info = lambda *_: (70 * GIB, 80 * GIB)
torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda *_: 0

_empty = torch.empty


def _unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    return _empty(*sizes, **options)


torch.empty = _unpinned
