"""What became of the rows that were run again: as JSON, as sentences, and as an exit code."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from cbatch.base.units import format_count
from cbatch.batch.stored_rows import StoredRow
from cbatch.cli.verify.compare import Difference, content_of, first_difference

MAX_SHOWN = 20
COMPANIES = ("alone", "together")
"""How rows are run again."""

LeftOut = Literal["validated", "tools", "no line"]
LEFT_OUT: Mapping[LeftOut, str] = {
    "validated": "whose answer was validated",
    "tools": "that called tools",
    "no line": "whose line the input does not have",
}
"""Rows that cannot be run again, by the reason."""


@dataclass(slots=True)
class VerifiedRow:
    """A row of the file that was run again.

    differences: from the row of the file, by the company in which it was run; None if there is none
    made:        digests of what was made
    """

    stored: StoredRow
    differences: dict[str, Difference | None] = field(default_factory=dict)
    made: dict[str, bytes] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        return any(found is not None for found in self.differences.values())

    @property
    def depends_on_company(self) -> bool:
        return len(set(self.made.values())) > 1


@dataclass(slots=True)
class Report:
    """What was found so far.

    name:    of the file
    unit:    what messages call a row: line, or row of a table
    total:   rows of the file
    sampled: rows of the sample
    rows:    those that were run again, by their index
    damaged: lines of the file that are no whole rows, by their number from 0, and why
    misfits: rows that were made with other options, by what differs, and the first of each
    """

    unit: str
    total: int
    sampled: int
    name: str = ""
    damaged: Mapping[int, str] = field(default_factory=dict)
    rows: dict[int, VerifiedRow] = field(default_factory=dict)
    left_out: Counter[LeftOut] = field(default_factory=Counter)
    misfits: Counter[str] = field(default_factory=Counter)
    first_misfit: dict[str, StoredRow] = field(default_factory=dict)

    def add_misfit(self, row: StoredRow, reason: str) -> None:
        self.misfits[reason] += 1
        self.first_misfit.setdefault(reason, row)

    def compare(self, company: str, stored: StoredRow, made: Mapping[str, Any]) -> None:
        """Takes a row that was made again, in some company."""
        row = self.rows.setdefault(stored.index, VerifiedRow(stored))
        row.differences[company] = first_difference(stored.fields, made)
        content = json.dumps(content_of(made), sort_keys=True).encode()
        row.made[company] = hashlib.blake2b(content, digest_size=16).digest()

    @property
    def different(self) -> list[VerifiedRow]:
        return [row for _, row in sorted(self.rows.items()) if row.differs]

    @property
    def exit_code(self) -> Literal[0, 1, 2]:
        """1 if a row differs or is damaged; 2 if rows have other options or no line, or nothing could be compared."""
        if self.different or self.damaged:
            return 1
        return 2 if self.misfits or self.left_out["no line"] or not self.rows else 0

    def as_dict(self) -> dict[str, Any]:
        different = self.different
        return {
            "rows": self.total,
            "damaged": len(self.damaged),
            "sampled": self.sampled,
            "compared": len(self.rows),
            "equal": len(self.rows) - len(different),
            "different": len(different),
            "depend_on_company": sum(row.depends_on_company for row in different),
            "other_options": self.misfits.total(),
            "left_out": {reason: self.left_out[reason] for reason in LEFT_OUT},
            "first_damaged": [
                {"line": number + 1, "reason": reason} for number, reason in islice(self.damaged.items(), MAX_SHOWN)
            ],
            "first_differences": [_as_dict(row) for row in different[:MAX_SHOWN]],
            "first_other_options": [
                {"index": row.index, "id": id_of(row), "rows": self.misfits[reason], "made_with": reason}
                for reason, row in self.first_misfit.items()
            ],
        }

    def sentences(self) -> Iterator[str]:
        """For people, the most important last."""
        different = self.different
        for row in different[:MAX_SHOWN]:
            yield from self._sentences_of(row)
        if len(different) > MAX_SHOWN:
            more = len(different) - MAX_SHOWN
            yield f"{format_count(more, 'more row')} {verb(more, 'differs', 'differ')}"
        for reason, first in self.first_misfit.items():
            count = self.misfits[reason]
            yield (
                f"{format_count(count, 'row')} {verb(count, 'was', 'were')} made with {reason} "
                f"(first: {self._where(first)}), and not run; give the options of the run that made the file"
            )
        yield from damage_sentences(self.damaged, self.name)
        for why, words in LEFT_OUT.items():
            if count := self.left_out[why]:
                yield f"left out: {format_count(count, 'row')} {words}"
        yield self._summary(different)

    def _summary(self, different: list[VerifiedRow]) -> str:
        if not self.rows:
            return f"none of {format_count(self.sampled, 'sampled row')} could be run again"
        done = f"{format_count(len(self.rows), 'row')} of {self.total:,} run again, alone and together"
        if not different:
            return f"{done}: all as in the file"
        depend = sum(row.depends_on_company for row in different)
        others = len(different) - depend
        parts = [f"{len(different):,} {verb(len(different), 'differs', 'differ')} from the file"]
        if depend:
            parts.append(f"{depend:,} {verb(depend, 'depends', 'depend')} on what runs beside")
        if others:
            parts.append(f"{others:,} {verb(others, 'is', 'are')} the same in any company, and not as in the file")
        return f"{done}: {'; '.join(parts)}"

    def _sentences_of(self, row: VerifiedRow) -> Iterator[str]:
        """One for each company, or one for both if what differs is the same."""
        where, found = self._where(row.stored), row.differences
        if len(set(found.values())) == 1 and len(found) == len(COMPANIES):
            yield f"{where}, alone and together: {found[COMPANIES[0]]}"
            return
        for company, difference in found.items():
            yield f"{where}, {company}: {difference or 'as in the file'}"

    def _where(self, row: StoredRow) -> str:
        name = id_of(row)
        return f"{self.unit} {row.index + 1}" + ("" if name is None else f" ({json.dumps(name, ensure_ascii=False)})")


def damage_sentences(damaged: Mapping[int, str], name: str) -> Iterator[str]:
    """damaged: lines of the file with this name, by their number from 0, and what is wrong with each"""
    for number, reason in islice(damaged.items(), MAX_SHOWN):
        yield f"line {number + 1} of {name} is damaged: it is {reason}"
    if (more := len(damaged) - MAX_SHOWN) > 0:
        yield f"{format_count(more, 'more line')} {verb(more, 'is', 'are')} damaged"


def verb(count: int, of_one: str, of_many: str) -> str:
    return of_one if count == 1 else of_many


def id_of(row: StoredRow) -> str | int | float | None:
    """The name that the user has given to a row."""
    name: str | int | float | None = row.fields.get("custom_id" if "custom_id" in row.fields else "id")
    return name


def _as_dict(row: VerifiedRow) -> dict[str, Any]:
    found = {company: one and one._asdict() for company, one in row.differences.items()}
    return {"index": row.stored.index, "id": id_of(row.stored), **found}
