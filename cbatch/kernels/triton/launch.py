"""Options of every launch of a layer's kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

from cbatch.kernels.triton.attention_tile import LAUNCH


@cache
def launch_options(threads: int) -> dict[str, Any]:
    """Of a launch with warps for so many threads, each of which reads 16 bytes, or a few times that."""
    return {"num_warps": min(max(threads // 32, 1), 16), **LAUNCH}
