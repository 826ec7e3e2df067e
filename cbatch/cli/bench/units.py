"""Figures with units, as a person reads them: three digits are enough."""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = "–"

_BELOW = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"))
"""Seconds below which a unit is used, how many of it a second is, and its name."""


def number(value: float | None) -> str:
    """1,610 or 18.8 or 0.412: no more digits than were measured, and none before the comma lost."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 9.995 else 2 if size >= 0.9995 or not size else 3
    return f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """18.8 ms, 1.31 s, 2.5 min."""
    if seconds is None:
        return NOTHING
    for limit, factor, unit in _BELOW:
        if abs(seconds) < limit * 0.9995:
            return f"{number(seconds * factor)} {unit}"
    return f"{number(seconds / 3600)} h"


def pair(times: Mapping[str, float | None] | None) -> str:
    """Median and 99th percentile; nothing if they are not known."""
    return f"{duration(times['p50'])} / {duration(times['p99'])}" if times else ""


def round_duration(seconds: float) -> str:
    """A round time, such as one at an axis or one that a user chose: 20 ms, 1 s."""
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{plain(seconds)} s"


def share(value: float | None) -> str:
    """60%; never 0% of something or 100% of not all."""
    if value is None:
        return NOTHING
    if 0 < value < 0.005:
        return "<1%"
    return f"{value:.1%}" if 0.995 <= value < 1 else f"{value:.0%}"


def times(ratio: float) -> str:
    """2.3 ×."""
    return f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.1f} ×" if ratio >= 0.095 else f"{ratio:.2f} ×"


def plain(value: float) -> str:
    """A round number, such as one at an axis: 0.5, 50, 2,000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
