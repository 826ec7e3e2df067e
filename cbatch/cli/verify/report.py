"""The report on rows that were run again and where they differ: as JSON, as sentences, and as an exit code."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

from cbatch.base.units import format_count, word_for
from cbatch.batch.journal import CHECK
from cbatch.requests.columns import OF_THE_MOMENT

IGNORED = {*OF_THE_MOMENT, CHECK}
"""Fields of --timings, which no two runs have alike, and what depends on them."""

OF_AN_OUTPUT = frozenset("text finish_reason reasoning tool_calls stop_reason closed note token_ids logprobs".split())
"""Fields that a row has of its first output."""

CROP = 40
"""Characters that are shown on either side of the first difference."""

Path = tuple[str | int, ...]

TokenIds = tuple[list[Any], list[Any]] | None
"""Those of both rows, of the nearest output around a place that has them."""

Place = tuple[Path, Any, Any, TokenIds]
"""A path, and what both rows have there; None for nothing."""


class Difference(NamedTuple):
    """The first place at which two rows differ.

    field:   its name, such as `choices[1].text`
    output:  number of the output that differs; None if what differs is of the whole row
    offset:  of the first character or token that differs; None if the field has neither
    unit:    what the offset counts: character or token
    token:   of a text, offset of the first token that differs, if both rows have token ids
    in_file, now: the values, or what stands around the first difference; null if there is no such field
    """

    field: str
    output: int | None
    offset: int | None
    unit: str | None
    token: int | None
    in_file: str
    now: str

    def __str__(self) -> str:
        place = "" if self.offset is None else f" from {self.unit} {self.offset} on"
        place += "" if self.token is None else f" (token {self.token})"
        return f"{self.field} differs{place}: {self.in_file} in the file, {self.now} now"


def content_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what depends on the moment."""
    return {name: value for name, value in row.items() if name not in IGNORED}


def first_difference(stored: Mapping[str, Any], made: Mapping[str, Any]) -> Difference | None:
    """None if the rows are equal but for fields of --timings and the check."""
    stored, made = content_of(stored), content_of(made)
    place = _first_place(stored, made)
    if place is None:
        return None
    path, one, other, ids = place
    offset = token = unit = None
    in_file, now = (f"{text[: 2 * CROP]}…" if len(text) > 2 * CROP else text for text in map(_shown, (one, other)))
    if isinstance(one, str) and isinstance(other, str):
        unit, offset = "character", _common_length(one, other)
        start, stop = max(offset - CROP, 0), offset + CROP
        in_file, now = (
            _shown(("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else ""))
            for text in (one, other)
        )
        token = None if ids is None else _common_length(*ids)
    elif len(path) > 1 and path[-2] == "token_ids":
        unit, offset = "token", int(path[-1])
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    output = 0 if path[0] in OF_AN_OUTPUT or path[:3] == ("response", "body", "output") else None
    if "choices" in path[:-1]:
        number = path[path.index("choices") + 1]
        output = number if isinstance(number, int) else None
    return Difference(name, output, offset, unit, token, in_file, now)


def _first_place(one: Any, other: Any, path: Path = (), ids: TokenIds = None) -> Place | None:
    """The first place below a path at which two values differ."""
    if isinstance(one, list) and isinstance(other, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        if isinstance(one.get("token_ids"), list) and isinstance(other.get("token_ids"), list):
            ids = one["token_ids"], other["token_ids"]
        for name in one | other:
            if name not in one or name not in other:
                return (*path, name), one.get(name), other.get(name), ids
            if (found := _first_place(one[name], other[name], (*path, name), ids)) is not None:
                return found
        return None
    is_same = one == other and isinstance(one, bool) == isinstance(other, bool)
    return None if is_same else (path, one, other, ids)


def _common_length(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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

    stored:      what the file has
    differences: from the row of the file, by the company in which it was run; None if there is none
    made:        digests of what was made
    """

    stored: Mapping[str, Any]
    differences: dict[str, Difference | None] = field(default_factory=dict)
    made: dict[str, bytes] = field(default_factory=dict)

    @property
    def depends_on_company(self) -> bool:
        return len(set(self.made.values())) > 1


@dataclass(slots=True)
class Report:
    """The findings so far.

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
    first_misfit: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def compare(self, company: str, stored: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Takes a row that was made again, in some company."""
        row = self.rows.setdefault(stored["index"], VerifiedRow(stored))
        row.differences[company] = first_difference(stored, made)
        content = json.dumps(content_of(made), sort_keys=True).encode()
        row.made[company] = hashlib.blake2b(content, digest_size=16).digest()

    @property
    def different(self) -> list[VerifiedRow]:
        return [row for _, row in sorted(self.rows.items()) if any(row.differences.values())]

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
            "first_differences": [
                {"index": row.stored["index"], "id": id_of(row.stored)}
                | {company: one and one._asdict() for company, one in row.differences.items()}
                for row in different[:MAX_SHOWN]
            ],
            "first_other_options": [
                {"index": row["index"], "id": id_of(row), "rows": self.misfits[reason], "made_with": reason}
                for reason, row in self.first_misfit.items()
            ],
        }

    def sentences(self) -> Iterator[str]:
        """For people, the most important last."""
        different = self.different
        for row in different[:MAX_SHOWN]:
            where, found = self._where(row.stored), row.differences
            if len(set(found.values())) == 1 and len(found) == len(COMPANIES):
                yield f"{where}, alone and together: {found[COMPANIES[0]]}"
            else:
                for company, difference in found.items():
                    yield f"{where}, {company}: {difference or 'as in the file'}"
        if len(different) > MAX_SHOWN:
            more = len(different) - MAX_SHOWN
            yield f"{format_count(more, 'more row')} {word_for(more, 'differs', 'differ')}"
        for reason, first in self.first_misfit.items():
            count = self.misfits[reason]
            yield (
                f"{format_count(count, 'row')} {word_for(count, 'was', 'were')} made with {reason} "
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
        parts = [f"{len(different):,} {word_for(len(different), 'differs', 'differ')} from the file"]
        if depend:
            parts.append(f"{depend:,} {word_for(depend, 'depends', 'depend')} on what runs beside")
        if others:
            parts.append(f"{others:,} {word_for(others, 'is', 'are')} the same in any company, and not as in the file")
        return f"{done}: {'; '.join(parts)}"

    def _where(self, row: Mapping[str, Any]) -> str:
        where, name = f"{self.unit} {row['index'] + 1}", id_of(row)
        return where if name is None else f"{where} ({json.dumps(name, ensure_ascii=False)})"


def damage_sentences(damaged: Mapping[int, str], name: str) -> Iterator[str]:
    """damaged: lines of the file with this name, by their number from 0, and what is wrong with each"""
    for number, reason in islice(damaged.items(), MAX_SHOWN):
        yield f"line {number + 1} of {name} is damaged: it is {reason}"
    if (more := len(damaged) - MAX_SHOWN) > 0:
        yield f"{format_count(more, 'more line')} {word_for(more, 'is', 'are')} damaged"


def id_of(row: Mapping[str, Any]) -> str | int | float | None:
    """The name that the user has given to a row."""
    name: str | int | float | None = row.get("custom_id" if "custom_id" in row else "id")
    return name
