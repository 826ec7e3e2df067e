"""The file that keeps a model's packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cbatch.base.quantization import Quantization
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES
from cbatch.model.packed_file import PackedFile
from cbatch.model.weight_cache import WeightCache

PACKING = {"version": 4, "lanes": LANES, "columns": COLUMNS}
"""The order of packed numbers. It is the same for every processor; whoever changes it raises the version."""


def packed_weights(
    cache: WeightCache, fingerprint: str, files: Sequence[Path], dtype: torch.dtype, quantize: Quantization | None
) -> PackedFile:
    """The file that keeps a model's packed weights.

    fingerprint: of the model's files, by samples; sizes and times notice any other change
    """
    times = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in files)]
    content = {"packing": PACKING, "model": fingerprint, "files": times, "dtype": str(dtype)}
    return PackedFile(cache, content | {"quantize": None if quantize is None else quantize.weights})
