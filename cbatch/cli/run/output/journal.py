"""What an earlier run left in its output file, and which of it still holds for this one."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from cbatch.cli.run.input.lines import Line
from cbatch.cli.run.output.row_keys import KEY_LENGTH, explain_difference
from cbatch.engine import ConfigError

KEY_BYTES = KEY_LENGTH // 2
ROW_BEGINNINGS = (b'{"index": ', b'{"id": "batch_req_')
SUPERSEDED = -1
"""Stands in `indices` for a row that another one has taken the place of, or will."""


@dataclass(slots=True)
class Journal:
    """The rows of an output file, in the order they lie there; a few bytes of memory for each.

    indices: which row of the input each answers, or GONE
    starts:  where each begins in the file
    keys:    KEY_BYTES of each
    failed:  whether each is an error row
    end:     where the last whole row ends; what lies behind it was torn in writing
    """

    indices: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    keys: bytearray = field(default_factory=bytearray)
    failed: bytearray = field(default_factory=bytearray)
    end: int = 0

    @classmethod
    def read(cls, file: IO[bytes], name: str) -> Journal:
        """Raises ConfigError where a row that is not the torn last one is no row of output."""
        journal = cls()
        for number, line in enumerate(file, start=1):
            try:
                if not line.endswith(b"\n"):
                    _check_torn(line)
                    break
                index, key, is_error = _row(line)
            except ValueError as error:
                raise ConfigError(
                    f"{name}, line {number}: {error}. The file is left as it is; without that line --resume can go on."
                ) from None
            journal.keys += key
            journal.failed.append(is_error)
            journal.append(index, len(line))
        journal._drop_repeated()
        return journal

    def append(self, index: int, size: int) -> None:
        """Takes in a row that was written behind all others."""
        self.indices.append(index)
        self.starts.append(self.end)
        self.end += size

    def span(self, number: int) -> tuple[int, int]:
        """Where in the file a row begins and ends."""
        last = number + 1 == len(self.starts)
        return self.starts[number], self.end if last else self.starts[number + 1]

    def key(self, number: int) -> str:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES].hex()

    def rows(self, *, input_order: bool) -> Iterator[int]:
        """Numbers of the rows that count, by index or as they lie in the file."""
        import numpy as np

        indices = np.frombuffer(self.indices, dtype=np.int64)
        order = indices.argsort(kind="stable") if input_order else np.arange(len(indices))
        return map(int, order[indices[order] != SUPERSEDED])

    def is_in_order(self, *, input_order: bool) -> bool:
        """Whether the file holds the rows that count, no others, and in this order."""
        return all(number == row for number, row in enumerate(self.rows(input_order=input_order))) and (
            SUPERSEDED not in self.indices
        )

    def _drop_repeated(self) -> None:
        """Of rows with the same index the last one counts."""
        previous = SUPERSEDED
        for number in self.rows(input_order=True):
            index = self.indices[number]
            if previous != SUPERSEDED and self.indices[previous] == index:
                self.indices[previous] = SUPERSEDED
            previous = number


@dataclass(slots=True)
class ResumePlan:
    """What of a journal holds for this run.

    kept:    by index of the input, whether its row is there already
    rows, errors: how many those are, and how many of them are error rows
    changed: rows that do not fit, by what differs, with the number of the first line each
    strays:  rows that answer lines which the input does not have, and the number of the first of those lines
    """

    kept: bytearray = field(default_factory=bytearray)
    rows: int = 0
    errors: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    strays: int = 0
    first_stray: int = 0

    @property
    def fits(self) -> bool:
        return not self.changed and not self.strays

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index < len(self.kept) and bool(self.kept[index])

    def keep(self, index: int, is_error: bool) -> None:
        self.kept.extend(bytes(max(index + 1 - len(self.kept), 0)))
        self.kept[index] = True
        self.rows += 1
        self.errors += is_error

    def differs(self, what: str, index: int) -> None:
        self.changed[what] += 1
        self.first.setdefault(what, index + 1)

    def strays_at(self, index: int) -> None:
        self.strays += 1
        self.first_stray = self.first_stray or index + 1

    def __str__(self) -> str:
        """What does not fit."""
        parts = [f"{count:,} made with {what} (first: line {self.first[what]})" for what, count in self.changed.items()]
        if self.strays:
            parts.append(f"{self.strays:,} for lines that the input does not have (first: line {self.first_stray})")
        return "; ".join(parts)


def plan_resume(
    journal: Journal, lines: Iterator[Line], make_key: Callable[[Line], str], *, retry_errors: bool
) -> ResumePlan:
    """Reads the input as far as the journal goes, and marks GONE in it what this run has to do again.

    key_of: the key that this run gives a line. Rows that fit no line of the input differ as well.
    """
    comparison = ResumePlan()
    line = next(lines, None)
    for number in journal.rows(input_order=True):
        index, is_error = journal.indices[number], bool(journal.failed[number])
        while line is not None and line.index < index:
            line = next(lines, None)
        if line is None or line.index > index:
            comparison.strays_at(index)
        elif is_error and retry_errors:
            pass
        elif (key := make_key(line)) == journal.key(number):
            comparison.keep(index, is_error)
            continue
        else:
            comparison.differs(explain_difference(key, journal.key(number)), index)
        journal.indices[number] = SUPERSEDED
    return comparison


def _row(line: bytes) -> tuple[int, bytes, bool]:
    """Index, key and whether it is an error row. Raises ValueError, with a sentence, for what is no row of ours."""
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("key"), str):
        raise ValueError("not a row of output, which has a key")
    index, key = fields.get("index"), fields["key"]
    if type(index) is not int or not 0 <= index < 2**63 or not re.fullmatch(f"[0-9a-f]{{{KEY_LENGTH}}}", key):
        raise ValueError("not a row of output, its index or key is wrong")
    return index, bytes.fromhex(key), fields.get("error") is not None


def _check_torn(line: bytes) -> None:
    """Raises ValueError where an unfinished last line is no beginning of a row, but something of somebody else's.

    After a power loss there may be zeros where data did not reach the disk.
    """
    with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        json.loads(line)
        _row(line)  # it is whole, so it is one of ours, or was never torn
    written = line.rstrip(b"\0")
    if not any(written.startswith(beginning[: len(written)]) for beginning in ROW_BEGINNINGS):
        raise ValueError("not a row of output, nor the beginning of one")
