"""Checks of an output file by itself, without a model: damaged, doubled, missing or superfluous rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count, word_for
from cbatch.batch.journal import Journal, StoredRows
from cbatch.batch.lines import checked_lines
from cbatch.batch.tables.row_input import RowInput
from cbatch.cli.verify.report import MAX_SHOWN, damage_sentences

Ranges = list[list[int]]
"""Numbers from 1 on, ascending, as pairs of a first and a last one."""


@dataclass(slots=True)
class FileReport:
    """The findings.

    name:        of the file
    unit:        what messages call a line of the input: line, or row of a table
    without_check: number of rows that an older version wrote
    missing:     lines of the input without a row; without an input, lines between the first and the last row
    superfluous: lines that have a row and are not in the input; None without an input
    """

    name: str
    unit: str
    journal: Journal
    rows: int = 0
    errors: int = 0
    without_check: int = 0
    missing: Ranges = field(default_factory=list)
    superfluous: Ranges | None = None

    @property
    def exit_code(self) -> Literal[0, 1]:
        """1 if a line is damaged, or the rows are not those of the input."""
        differs = self.superfluous is not None and (self.missing or self.superfluous)
        return 1 if self.journal.damaged or differs else 0

    def as_dict(self) -> dict[str, Any]:
        journal, is_compared = self.journal, self.superfluous is not None
        return {
            "rows": self.rows,
            "errors": self.errors,
            "without_check": self.without_check,
            "torn_bytes": journal.torn,
            "damaged": len(journal.damaged),
            "doubled": len(journal.doubled),
            "missing": _size(self.missing) if is_compared else None,
            "superfluous": _size(self.superfluous or []) if is_compared else None,
            "damaged_lines": [{"line": number + 1, "reason": reason} for number, reason in journal.damaged.items()],
            "doubled_lines": [
                {"line": number + 1, "index": index} for number, index in sorted(journal.doubled.items())
            ],
            "missing_lines": self.missing,
            "superfluous_lines": self.superfluous,
        }

    def sentences(self) -> Iterator[str]:
        """For people, the most important last."""
        journal = self.journal
        if count := self.without_check:
            rows = f"{format_count(count, 'row')} {word_for(count, 'was', 'were')}"
            yield f"{rows} written by an older version, without a check: a change of their bytes is not noticed"
        if count := len(journal.doubled):
            rows = f"{format_count(count, 'row')} {word_for(count, 'is', 'are')}"
            yield f"{rows} replaced by later ones (first: line {min(journal.doubled) + 1} of {self.name})"
        if journal.torn:
            yield "the last row is torn: a run has ended there, or is writing it"
        yield from damage_sentences(journal.damaged, self.name)
        if self.missing:
            blank = "" if self.superfluous is not None else ", unless they are blank"
            yield f"no row for {self._lines(self.missing)}{blank}"
        if self.superfluous:
            yield f"rows for {self._lines(self.superfluous)}, which the input does not have"
        problems = [
            format_count(len(journal.damaged), "damaged line") if journal.damaged else "",
            f"{_size(self.missing):,} missing" if self.missing and self.superfluous is not None else "",
            f"{_size(self.superfluous):,} superfluous" if self.superfluous else "",
        ]
        errors = f", {self.errors:,} of them {word_for(self.errors, 'an error', 'errors')}" if self.errors else ""
        found = ", ".join(filter(None, problems)) or "nothing is damaged"
        yield f"{self.name}: {format_count(self.rows, 'row')}{errors}; {found}"

    def _lines(self, ranges: Ranges) -> str:
        shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:MAX_SHOWN]]
        more = f" and {_size(ranges[MAX_SHOWN:]):,} more" if len(ranges) > MAX_SHOWN else ""
        return f"{self.unit}{'s' if _size(ranges) > 1 else ''} {', '.join(shown)}{more}"


def check_file(name: str, stored: StoredRows, unit: str, source: RowInput | None) -> FileReport:
    """Looks at every row of a file.

    source: the input of the run, if it is to be compared

    Raises ConfigError if the file is empty, and RunFailed if the input cannot be read.
    """
    journal = stored.journal
    if not journal.indices and not journal.damaged and not journal.torn:
        raise ConfigError(f"{name} has no rows.")
    report = FileReport(name, unit, journal)
    numbers = array("q", journal.rows(input_order=True))
    report.rows = len(numbers)
    report.errors = sum(journal.failed[number] for number in numbers)
    report.without_check = sum(not journal.has_check(number) for number in numbers)
    rows = (journal.indices[number] for number in numbers)
    if source is None:
        previous = -1
        for index in rows:
            _add(report.missing, previous + 1, index - 1)
            previous = index
        return report
    report.superfluous = superfluous = list[list[int]]()
    lines = ((line.index, report.missing) for line in checked_lines(source.lines()))
    both = merge(lines, ((row, superfluous) for row in rows), key=itemgetter(0))  # which ascend
    for index, found in groupby(both, key=itemgetter(0)):
        alone, *others = (ranges for _, ranges in found)
        if not others:
            _add(alone, index, index)
    return report


def _add(ranges: Ranges, first: int, last: int) -> None:
    """Adds the lines with these indices, which come after all others."""
    if first > last:
        return
    if ranges and ranges[-1][1] == first:
        ranges[-1][1] = last + 1
    else:
        ranges.append([first + 1, last + 1])


def _size(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges)
