"""Percentiles of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The 50th, 90th and 99th percentile; None if there are no values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        if not len(values):
            return cls()
        import numpy as np

        return cls(*np.percentile(values, (50, 90, 99)).tolist())
