"""How unequal lengths are in published data, and what slots that never wait would gain on them.

    python -m scripts.benchmarks lengths AzureLLMInferenceTrace_conv.csv --column GeneratedTokens
    python -m scripts.benchmarks lengths model_outputs.json --column output

A file is CSV, JSON Lines or a JSON array. Numbers of the column are lengths; texts count by their characters, since
tokens have much the same number of them. Lengths below 1 are left out. The gain is the mean of the longest of so many
lengths to their mean: static batches wait for the longest. Published lengths are not log-normal, since they are cut off
where a model may write no more. So their skew is that of log-normal lengths with the same gain, for the first number of
slots.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median, pstdev
from statistics import fmean as mean
from typing import Any

from scripts.benchmarks.harness import Report

HIGHEST_SKEW, QUANTILES = 3.0, 10_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of a file's lengths.

    deviation: standard deviation of their natural logarithms
    gains:     by number of slots
    skew:      of log-normal lengths that have the gain of the first number of slots
    """

    name: str
    rows: int
    median: float
    mean: float
    longest: float
    deviation: float
    gains: dict[int, float]
    skew: float

    @classmethod
    def of(cls, name: str, lengths: Sequence[float], slots: Sequence[int]) -> Lengths:
        gains = {count: mean_longest(lengths, count) / mean(lengths) for count in slots}
        return cls(
            name=name,
            rows=len(lengths),
            median=median(lengths),
            mean=mean(lengths),
            longest=max(lengths),
            deviation=pstdev(map(math.log, lengths)),
            gains=gains,
            skew=skew_of_gain(gains[slots[0]], slots[0]),
        )


def mean_longest(lengths: Sequence[float], count: int) -> float:
    """The mean of the longest of `count` lengths, over all ways to draw them with replacement."""
    ordered, size = sorted(lengths), len(lengths)
    return sum(
        length * ((place / size) ** count - ((place - 1) / size) ** count)
        for place, length in enumerate(ordered, start=1)
    )


def skew_of_gain(gain: float, slots: int) -> float:
    """The skew of log-normal lengths with this gain, to a hundredth; at most HIGHEST_SKEW."""
    skews = [hundredth / 100 for hundredth in range(round(100 * HIGHEST_SKEW) + 1)]
    return skews[min(bisect_left(skews, gain, key=lambda skew: _lognormal_gain(skew, slots)), len(skews) - 1)]


def _lognormal_gain(skew: float, slots: int) -> float:
    normal = NormalDist()
    lengths = [math.exp(skew * normal.inv_cdf((place + 0.5) / QUANTILES)) for place in range(QUANTILES)]
    return mean_longest(lengths, slots) / mean(lengths)


def read_lengths(path: Path, column: str) -> list[float]:
    """The lengths of a column. Raises ValueError for a file without it."""
    found = []
    for number, row in enumerate(_rows(path), start=1):
        if column not in row:
            raise ValueError(f"{path}, row {number}: there is no column {column!r}, but {', '.join(row)}.")
        value = row[column]
        found.append(float(value) if _is_number(value) else len(value))
    return [length for length in found if length >= 1]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix == ".json":
            yield from json.load(file)
        else:
            yield from map(json.loads, file)


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="CSV, JSON Lines or a JSON array")
    parser.add_argument("--column", default="GeneratedTokens", help="of lengths or of texts (default: %(default)s)")
    parser.add_argument("--slots", nargs="+", type=int, default=[8, 16, 32], help="of static batches")


def run(options: argparse.Namespace, report: Report) -> int:
    found = [Lengths.of(path.name, read_lengths(path, options.column), options.slots) for path in options.files]
    gains = [f"gain, {count} slots" for count in options.slots]
    head = ["file", "rows", "median", "mean", "longest", "deviation of ln", *gains, "skew"]
    lines = [
        [
            one.name,
            f"{one.rows:,}",
            f"{one.median:,.0f}",
            f"{one.mean:,.0f}",
            f"{one.longest:,.0f}",
            f"{one.deviation:.2f}",
            *(f"{gain:.2f}" for gain in one.gains.values()),
            f"{one.skew:.2f}",
        ]
        for one in found
    ]
    report.table([head, *lines])
    report.figures["lengths"] = found
    return 0
