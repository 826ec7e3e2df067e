"""The rows that an earlier run left in its output file, and which of them this run keeps."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import IO

from cbatch.engine.base.errors import ConfigError
from cbatch.engine.batch.lines import Line
from cbatch.engine.batch.unfinished.truncated_rows import earlier_limits, known_tokens, with_key
from cbatch.engine.requests.row_keys import KEY_LENGTH, explain_difference

KEY_BYTES = KEY_LENGTH // 2
ROW_BEGINNINGS = (b'{"index": ', b'{"id": "batch_req_')
SUPERSEDED = -1
"""Stands in `indices` for a row that a later one has replaced, or will."""

Keyed = Callable[[Iterable[Line]], Iterator[tuple[Line, str]]]
"""Gives lines back in their order, each with the key of its row of output; see `BatchDriver.keyed`."""

NO_LINE = "for lines that the input does not have"


@dataclass(slots=True)
class Journal:
    """The rows of an output file in the order of the file, in a few bytes of memory for each.

    indices: index of the input line that each row answers, or SUPERSEDED
    starts:  offset of each row in the file
    keys:    KEY_BYTES for each row
    failed:  whether each row is an error row
    tries:   of error rows that were validated, by their number
    end:     offset after the last whole row; the rest of the file is a torn row
    """

    indices: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    keys: bytearray = field(default_factory=bytearray)
    failed: bytearray = field(default_factory=bytearray)
    tries: dict[int, int] = field(default_factory=dict)
    end: int = 0

    @classmethod
    def read(cls, file: IO[bytes], name: str) -> Journal:
        """Raises ConfigError if a line other than a torn last one is not a row of output."""
        journal = cls()
        for number, line in enumerate(file, start=1):
            try:
                if not line.endswith(b"\n"):
                    _check_torn(line)
                    break
                index, key, is_error, tries = _row(line)
            except ValueError as error:
                raise ConfigError(
                    f"{name}, line {number}: {error}. "
                    "The file is left as it is; --resume works once that line is removed."
                ) from None
            journal.keys += key
            journal.failed.append(is_error)
            if tries:
                journal.tries[len(journal.failed) - 1] = tries
            journal.append(index, len(line))
        journal._drop_repeated()
        return journal

    def append(self, index: int, size: int) -> None:
        """Adds a row that was written at the end of the file."""
        self.indices.append(index)
        self.starts.append(self.end)
        self.end += size

    def span(self, number: int) -> tuple[int, int]:
        """Offsets in the file at which a row begins and ends."""
        last = number + 1 == len(self.starts)
        return self.starts[number], self.end if last else self.starts[number + 1]

    def key(self, number: int) -> str:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES].hex()

    def rows(self, *, input_order: bool) -> Iterator[int]:
        """Numbers of the rows that are not superseded, by index or in the order of the file."""
        import numpy as np

        indices = np.frombuffer(self.indices, dtype=np.int64)
        order = indices.argsort(kind="stable") if input_order else np.arange(len(indices))
        return map(int, order[indices[order] != SUPERSEDED])

    def is_in_order(self, *, input_order: bool) -> bool:
        """Whether the file holds the rows that are not superseded, no others, and in this order."""
        return all(number == row for number, row in enumerate(self.rows(input_order=input_order))) and (
            SUPERSEDED not in self.indices
        )

    def _drop_repeated(self) -> None:
        """Marks all but the last row of each index as superseded."""
        previous = SUPERSEDED
        for number in self.rows(input_order=True):
            index = self.indices[number]
            if previous != SUPERSEDED and self.indices[previous] == index:
                self.indices[previous] = SUPERSEDED
            previous = number


def _no_row(number: int) -> bytes:
    raise NotImplementedError  # a table has no rows to go on with


@dataclass(slots=True)
class ResumePlan:
    """Which rows of a journal this run keeps. `index in plan` tells whether a line's row is kept.

    kept:         for each index, whether its row is kept
    rows, errors: number of kept rows, and of error rows among them
    misfits:      number of rows that do not fit this run, by the reason
    first_misfit: line number of the first row with each reason
    tries:        of rows that are run again because none of them was good, by their index
    rekeyed:      numbers of kept rows that have to be written again, with the key that is in the journal by now
    truncated:    numbers of rows that go on with their tokens, by their index
    restarted:    number of rows of a run with a lower limit that begin anew
    read_row:     gives the row with a number
    """

    kept: bytearray = field(default_factory=bytearray)
    rows: int = 0
    errors: int = 0
    misfits: Counter[str] = field(default_factory=Counter)
    first_misfit: dict[str, int] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    rekeyed: array[int] = field(default_factory=lambda: array("q"))
    truncated: dict[int, int] = field(default_factory=dict)
    restarted: int = 0
    read_row: Callable[[int], bytes] = _no_row

    @property
    def fits(self) -> bool:
        return not self.misfits

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index < len(self.kept) and bool(self.kept[index])

    def keep(self, index: int, is_error: bool) -> None:
        self.kept.extend(bytes(max(index + 1 - len(self.kept), 0)))
        self.kept[index] = True
        self.rows += 1
        self.errors += is_error

    def add_misfit(self, reason: str, index: int) -> None:
        self.misfits[reason] += 1
        self.first_misfit.setdefault(reason, index + 1)

    def with_history(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines, each with what earlier runs have done for its row.

        That is the number of tries, so that further ones are other ones, or the tokens with which the row goes on.
        """
        for line in lines:
            if line.index in self.tries:
                yield replace(line, tries=self.tries[line.index])
            elif line.index in self.truncated:
                yield replace(line, known=known_tokens(self.read_row(self.truncated[line.index])))
            else:
                yield line

    def __str__(self) -> str:
        """Says what does not fit: changed lines first, then lines that are missing."""
        reasons = sorted(self.misfits, key=NO_LINE.__eq__)
        return "; ".join(f"{self.misfits[one]:,} {one} (first: line {self.first_misfit[one]})" for one in reasons)


def plan_resume(
    journal: Journal,
    lines: Iterator[Line],
    keyed: Keyed,
    *,
    retry_errors: bool,
    read_row: Callable[[int], bytes] = _no_row,
    max_tokens: int | None = None,
) -> ResumePlan:
    """Compares a journal with the input, and marks the rows that this run has to compute again as superseded.

    lines:      read up to the last one that has a row in the journal
    keyed:      gets the lines whose row may be kept
    read_row:   gives the row with a number
    max_tokens: the limit of this run, if rows of runs with a lower one are to go on
    """
    plan = ResumePlan(read_row=read_row)
    limits: Sequence[int] = ()
    if max_tokens is not None:
        limits = earlier_limits(map(read_row, journal.rows(input_order=True)), max_tokens)
    compared: deque[int] = deque()
    """Rows whose lines `keyed` has taken and not yet given back: it may read ahead."""
    keys = keyed(_lines_to_compare(journal, lines, plan, compared, limits, retry_errors=retry_errors))
    for line, key in keys:
        number, earlier = compared.popleft(), [other for _, other in islice(keys, len(limits))]
        if key == journal.key(number):
            plan.keep(line.index, bool(journal.failed[number]))
        elif journal.key(number) in earlier:
            _take_over(journal, plan, number, key)
        else:
            plan.add_misfit(f"made with {explain_difference(key, journal.key(number))}", line.index)
            journal.indices[number] = SUPERSEDED
    return plan


def _take_over(journal: Journal, plan: ResumePlan, number: int, key: str) -> None:
    """Keeps a row of a run that had a lower limit, with this key; or lets it go on; or begins it anew."""
    index, row = journal.indices[number], plan.read_row(number)
    if with_key(row, key) is not None:
        journal.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] = bytes.fromhex(key)
        plan.keep(index, is_error=False)
        plan.rekeyed.append(number)
        return
    journal.indices[number] = SUPERSEDED
    if known_tokens(row):
        plan.truncated[index] = number
    else:
        plan.restarted += 1


def _lines_to_compare(
    journal: Journal,
    lines: Iterator[Line],
    plan: ResumePlan,
    compared: deque[int],
    limits: Sequence[int],
    *,
    retry_errors: bool,
) -> Iterator[Line]:
    """The lines whose row is kept if its key fits, each again with the limits that earlier runs may have had.

    Marks rows that are not kept whatever their key is.
    """
    line = next(lines, None)
    for number in journal.rows(input_order=True):
        index = journal.indices[number]
        while line is not None and line.index < index:
            line = next(lines, None)
        if line is None or line.index > index:
            plan.add_misfit(NO_LINE, index)
        elif not (retry_errors and journal.failed[number]):
            compared.append(number)
            yield line
            yield from (replace(line, max_tokens=limit) for limit in limits)
            continue
        elif number in journal.tries:
            plan.tries[index] = journal.tries[number]
        journal.indices[number] = SUPERSEDED


def _row(line: bytes) -> tuple[int, bytes, bool, int]:
    """Index, key, whether it is an error row, and how many tries it has had then.

    Raises ValueError, with a reason, for what is not a row of output.
    """
    try:
        fields = json.loads(line.decode())  # not the strict reader: `extra` nests one level deeper than input may
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("key"), str):
        raise ValueError("not a row of output, which has a key")
    index, key = fields.get("index"), fields["key"]
    if type(index) is not int or not 0 <= index < 2**63 or not re.fullmatch(f"[0-9a-f]{{{KEY_LENGTH}}}", key):
        raise ValueError("not a row of output, its index or key is wrong")
    is_error, validation = fields.get("error") is not None, fields.get("validation")
    tries = validation.get("tries") if is_error and isinstance(validation, dict) else 0
    return index, bytes.fromhex(key), is_error, tries if type(tries) is int else 0


def _check_torn(line: bytes) -> None:
    """Raises ValueError if a last line without a line end is not the beginning of a row: then the file is not ours.

    After a power loss, there may be zeros in place of data that did not reach the disk.
    """
    with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        json.loads(line)
        _row(line)  # valid JSON was not torn, so it must be a whole row
    written = line.rstrip(b"\0")
    if not any(written.startswith(beginning[: len(written)]) for beginning in ROW_BEGINNINGS):
        raise ValueError("neither a row of output nor the beginning of one")
