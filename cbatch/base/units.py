"""Amounts as users write and read them."""

from __future__ import annotations

import re

from cbatch.base.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_memory(text: str, free: int) -> int:
    """Bytes meant by `90%` (of `free`), `4GiB`, `500MB` or a plain number. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(%|[A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else None
    if match and unit == "%" and 0 < float(match[1]) <= 100:
        return int(free * float(match[1]) / 100)
    if match and unit in _UNITS:
        return int(float(match[1]) * _UNITS[unit])
    raise ConfigError(f"{text!r} is not an amount of memory; write it as 4GiB, 500MiB or 90%.")


def rounded_s(seconds: float) -> float:
    """Seconds for rows and figures, to the microsecond: no clock tells more."""
    return round(seconds, 6)


def format_count(count: int, what: str) -> str:
    """Like `1 row` or `2,000 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def word_for(count: int, of_one: str, of_many: str) -> str:
    """The word that goes with a count: `is` or `are`."""
    return of_one if count == 1 else of_many


def format_bytes(count: float) -> str:
    """A size for users: 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
