"""The rows of an output file: the check that each ends with, and what an earlier run has left."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any
from zlib import crc32

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count
from cbatch.requests.row_keys import KEY_LENGTH

CHECK = "check"
"""Name of the field: the last one of a row."""

_BEGINNING = b', "check": "'
_SIZE = len(_BEGINNING) + len(b'01234567"}\n')


def with_check(row: bytes) -> bytes:
    """A row as it is written: with the CRC-32 of all bytes before the check, as eight hexadecimal digits.

    row: a JSON object with fields, as a line
    """
    return join_check(row, f"{crc32(row.rstrip()[:-1]):08x}")


def join_check(row: bytes, check: str) -> bytes:
    """A row with a check that it has had before; if that is empty, as an older version wrote it."""
    return b'%s%s%s"}\n' % (row.rstrip()[:-1], _BEGINNING, check.encode()) if check else row


def without_check(row: bytes) -> bytes:
    """A row with a check, as it was before it had one."""
    return row[:-_SIZE] + b"}\n"


def fits_check(line: bytes) -> bool | None:
    """Whether a line, with its line end, has the bytes that its check was made of. None if it ends with no check."""
    end = line[-_SIZE:]
    if not end.startswith(_BEGINNING):
        return None
    return end == b'%s%08x"}\n' % (_BEGINNING, crc32(memoryview(line)[:-_SIZE]))


KEY_BYTES = KEY_LENGTH // 2
ROW_BEGINNINGS = (b'{"index": ', b'{"id": "batch_req_')
SUPERSEDED = -1
"""Stands in `indices` for a row that a later one has replaced, or will, and for a line that is no whole row."""

OLDER_FIELDS = frozenset(
    "index id text finish_reason reasoning tool_calls stop_reason token_ids logprobs choices prompt_logprobs usage key "
    "error custom_id response tool_messages validation extra cached_tokens ttft_s elapsed_s from_cache".split()
)
"""Fields of rows that were written before rows had a check. A row with another field and no check is damaged."""

KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")
_KEY_FIELD = re.compile(rb'"key": ?"[0-9a-f]{%d}"' % KEY_LENGTH)
_CHECK = re.compile(rb', "%s": "[0-9a-f]{8}"}\s*$' % CHECK.encode())


@dataclass(slots=True)
class Journal:
    """The rows of an output file in the order of the file, in a few bytes of memory for each.

    indices: index of the input line that each row answers, or SUPERSEDED
    starts:  offset of each row in the file
    keys:    KEY_BYTES for each row
    failed:  whether each row is an error row
    columns: digest of the columns that each row carries along
    tries:   of error rows that were validated, by their number
    end:     offset after the last whole line; the rest of the file is a torn row
    torn:    bytes of a torn row at the end
    damaged: what is wrong with each line that is no row, or a row whose bytes have changed, by its number
    doubled: index of each row that a later one has replaced, by its number
    first_checked: number of the first row with a check; those before it are of an older version. None if none has one
    fd:      of the file, if `row` is to read it
    """

    indices: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    keys: bytearray = field(default_factory=bytearray)
    failed: bytearray = field(default_factory=bytearray)
    columns: array[int] = field(default_factory=lambda: array("q"))
    tries: dict[int, int] = field(default_factory=dict)
    end: int = 0
    torn: int = 0
    damaged: dict[int, str] = field(default_factory=dict)
    doubled: dict[int, int] = field(default_factory=dict)
    first_checked: int | None = None
    fd: int | None = None

    @classmethod
    def read(cls, file: IO[bytes], name: str) -> Journal:
        """Raises ConfigError if the file has lines, and nothing in them was a row of output."""
        journal, is_ours = cls(), False
        for line in file:
            if not line.endswith(b"\n") and _is_torn(line):
                journal.torn = len(line)
                break
            is_ours = journal._take(line) or is_ours
        if journal.damaged and not is_ours:
            number, reason = next(iter(journal.damaged.items()))
            raise ConfigError(
                f"{name} is not a file of output rows: line {number + 1} is {reason}. The file is left as it is."
            )
        previous = SUPERSEDED
        for number in journal.rows(input_order=True):  # all but the last row of each index are superseded
            index = journal.indices[number]
            if previous != SUPERSEDED and journal.indices[previous] == index:
                journal.doubled[previous] = index
                journal.indices[previous] = SUPERSEDED
            previous = number
        return journal

    def append(self, index: int, size: int) -> None:
        """Adds a row that was written at the end of the file."""
        self.first_checked = len(self.indices) if self.first_checked is None else self.first_checked
        self._add(index, size)

    def has_check(self, number: int) -> bool:
        return self.first_checked is not None and number >= self.first_checked

    def row(self, number: int) -> bytes:
        assert self.fd is not None
        start, stop = self.starts[number], self.end if number + 1 == len(self.starts) else self.starts[number + 1]
        return os.pread(self.fd, stop - start, start)

    def key(self, number: int) -> str:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES].hex()

    def rows(self, *, input_order: bool) -> Iterator[int]:
        """Numbers of the rows that are not superseded, by index or in the order of the file."""
        import numpy as np

        indices = np.frombuffer(self.indices, dtype=np.int64)
        order = indices.argsort(kind="stable") if input_order else np.arange(len(indices))
        return map(int, order[indices[order] != SUPERSEDED])

    def is_in_order(self, *, input_order: bool) -> bool:
        """Whether the file holds the rows that are not superseded, no others, all with checks, and in this order."""
        is_checked = self.first_checked == 0 or not self.indices
        rows = enumerate(self.rows(input_order=input_order))
        return is_checked and all(number == row for number, row in rows) and SUPERSEDED not in self.indices

    def damage(self) -> str:
        """Says how many lines are damaged, and what is wrong with the first one."""
        number, reason = next(iter(self.damaged.items()))
        return f"{format_count(len(self.damaged), 'damaged line')} (first: line {number + 1}, which is {reason})"

    def _take(self, line: bytes) -> bool:
        """Adds the next line of the file. Returns whether it is a row of output, or was one before it was damaged."""
        number, is_checked = len(self.indices), fits_check(line)
        try:
            index, key, is_error, tries, columns = _parse(line, is_checked, may_be_older=self.first_checked is None)
        except ValueError as error:
            self.damaged[number] = str(error)
            if line.endswith(b"\n"):  # else it is cut off
                self._add(SUPERSEDED, len(line))
                self.keys += bytes(KEY_BYTES)
                self.failed.append(False)
                self.columns.append(0)
            return _CHECK.search(line) is not None or (b'"index":' in line and _KEY_FIELD.search(line) is not None)
        if is_checked and self.first_checked is None:
            self.first_checked = number
        self._add(index, len(line))
        self.keys += key
        self.failed.append(is_error)
        self.columns.append(columns)
        if tries:
            self.tries[number] = tries
        return True

    def _add(self, index: int, size: int) -> None:
        self.indices.append(index)
        self.starts.append(self.end)
        self.end += size


def columns_digest(columns: Mapping[str, Any]) -> int:
    """A hash of columns that a row carries along; of this process, and in no order."""
    return hash(json.dumps(columns, sort_keys=True)) if columns else 0


def _parse(line: bytes, is_checked: bool | None, *, may_be_older: bool) -> tuple[int, bytes, bool, int, int]:
    """Index, key, whether it is an error row, how many tries it has had then, and the digest of its columns.

    Raises ValueError, with a reason, for what is not a row of output, or not as it was written.

    is_checked:   whether the line fits its check; None if it ends with none
    may_be_older: whether rows without a check are taken
    """
    if is_checked is False:
        raise ValueError("not as it was written: its check does not fit")
    try:
        fields = json.loads(line.decode())  # not the strict reader: `extra` nests one level deeper than input may
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("key"), str):
        raise ValueError("not a row of output, which has a key")
    index, key = fields.get("index"), fields["key"]
    if type(index) is not int or not 0 <= index < 2**63 or not KEY.fullmatch(key):
        raise ValueError("not a row of output, its index or key is wrong")
    if not (is_checked or (may_be_older and fields.keys() <= OLDER_FIELDS)):
        raise ValueError("not as it was written: it does not end with a check")
    is_error, validation = fields.get("error") is not None, fields.get("validation")
    tries = validation.get("tries") if is_error and isinstance(validation, dict) else 0
    digest = columns_digest(fields.get("extra") or {})
    return index, bytes.fromhex(key), is_error, tries if type(tries) is int else 0, digest


def _is_torn(line: bytes) -> bool:
    """Whether a last line without a line end is the beginning of a row, which a kill has left.

    After a power loss, there may be zeros in place of data that did not reach the disk.
    """
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        written = line.rstrip(b"\0")
        return any(written.startswith(beginning[: len(written)]) for beginning in ROW_BEGINNINGS)
    try:  # valid JSON was not torn, so it must be a whole row
        _parse(line + b"\n", fits_check(line + b"\n"), may_be_older=True)
    except ValueError:
        return False
    return True


class StoredRows(ExitStack):
    """The rows of a file of JSON Lines; the last one of each index counts.

    Used as a context, which closes the file. Keeps some 40 bytes for each row.

    journal: says also which lines are damaged, which are no rows here
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        """Raises ConfigError if no line of the file was a row of output."""
        super().__init__()
        self._file = self.enter_context(file)
        self.journal = Journal.read(self._file, name)
        self._numbers = array("q", self.journal.rows(input_order=True))

    def __len__(self) -> int:
        return len(self._numbers)

    def in_order(self) -> Iterator[tuple[int, bytes]]:
        """The rows by their indices, each with it."""
        self.journal.fd = self._file.fileno()
        return ((self.journal.indices[number], self.journal.row(number)) for number in self._numbers)

    def read(self, places: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yields some of the rows, as JSON, in the order of the file.

        places: of the rows among those that count, in the order of their indices
        """
        wanted = {self._numbers[place] for place in places}
        self._file.seek(0)
        for number, line in enumerate(self._file):
            if number in wanted:
                yield json.loads(line)
                wanted.remove(number)
                if not wanted:
                    return
