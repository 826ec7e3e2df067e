"""Percentiles of times and of lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

OF_TIMES = {"p50": 50, "p90": 90, "p99": 99}


def percentiles(
    values: Sequence[float], ranks: Mapping[str, int] = OF_TIMES, method: Literal["linear", "nearest"] = "linear"
) -> dict[str, Any]:
    """The percentiles by their names; None if there are no values."""
    if not len(values):
        return dict.fromkeys(ranks)
    import numpy as np

    return dict(zip(ranks, np.percentile(values, list(ranks.values()), method=method).tolist(), strict=True))
