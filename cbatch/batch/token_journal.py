"""A file with the tokens of answers that are not finished yet, beside the file of finished rows.

Tokens are appended every few seconds. When those of finished rows outweigh the others, the file is written anew and put
in its place, so that there is a whole one at every moment. Nothing relies on it: what is damaged or missing is computed
again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import KnownOutput, TokenLogprobs

CHECK_BYTES = 8


class TokenRecord(NamedTuple):
    """Some tokens of an answer.

    line:    index of the row's line
    row_key: the row's key
    request: which of the row's requests it is: a key of all that decides its tokens
    output:  which of the request's outputs
    start:   how many tokens the output has before these
    tokens:  with their log-probabilities, if the row wants any
    """

    line: int
    row_key: str
    request: str
    output: int
    start: int
    tokens: KnownOutput


def format_record(record: TokenRecord) -> bytes:
    """A record as a line, with the line end."""
    tokens, logprobs = record.tokens
    fields: dict[str, Any] = {**record._asdict(), "tokens": list(tokens)}
    if logprobs:
        fields["logprobs"] = [(one.logprob, one.top) for one in logprobs]
    data = json.dumps(fields, separators=(",", ":")).encode()
    return b"%s %s\n" % (_checksum(data), data)


def parse_record(line: bytes) -> TokenRecord:
    """Raises ValueError, KeyError or TypeError for what is no record, or a damaged one."""
    check, _, data = line.removesuffix(b"\n").partition(b" ")
    if check != _checksum(data):
        raise ValueError("the checksum is another one")
    fields = json.loads(data)
    tokens, packed = fields["tokens"], fields.get("logprobs", ())
    logprobs = [
        TokenLogprobs(token, logprob, [(other, value) for other, value in top])
        for token, (logprob, top) in zip(tokens, packed, strict=bool(packed))
    ]
    known = KnownOutput(tokens, logprobs)
    return TokenRecord(fields["line"], fields["row_key"], fields["request"], fields["output"], fields["start"], known)


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECK_BYTES).hexdigest().encode()


_log = logging.getLogger("cbatch")

MAGIC = b"cbatch tokens "
"""The beginning of each such file."""

VERSION = 1
"""Changes if files of other versions cannot be read."""

ENDING = ".tokens"
DEFAULT_INTERVAL_S = 5.0
SLACK_BYTES = 2**20
"""Bytes of finished rows that may stay in the file in any case."""

Lines = Sequence[tuple[int, bytes]]
"""Lines of the file, each with the index of its row."""


@dataclass(frozen=True, slots=True)
class TokenJournalConfig:
    """Where tokens are kept.

    path:       of the file
    resume:     whether the tokens of an earlier run count
    interval_s: seconds from one record of an answer to the next; None: what an earlier run has left is only read
    """

    path: str
    resume: bool = False
    interval_s: float | None = DEFAULT_INTERVAL_S


@dataclass(slots=True)
class UnfinishedRow:
    """A row's remains of an earlier run: its key and, for each of its requests, the outputs by their numbers."""

    key: str
    requests: dict[str, dict[int, KnownOutput]] = field(default_factory=dict)


class TokenJournal:
    """Reads what an earlier run has left, and appends. The lock of the output keeps other runs away from it.

    A journal that cannot be written ends no run: it is left out from then on, with a warning.

    unfinished: rows of the earlier run, by the index of their line, until they are dropped
    """

    def __init__(self, path: Path, model: str, *, resume: bool, writes: bool = True) -> None:
        """
        model:  its fingerprint; tokens of another model are not read
        resume: whether an earlier run is continued; else what it has left is removed
        writes: False to read only

        Raises ConfigError if the file is of something else or cannot be used.
        """
        digest = hashlib.blake2b(model.encode(), digest_size=16).hexdigest()
        self._path = path
        self._head = MAGIC + f"{VERSION} {digest}\n".encode()
        self._writes = writes
        self._fd: int | None = None
        self._size = self._live = 0
        """Bytes of the file, and of the lines of rows that are not dropped."""
        self._places: dict[int, list[tuple[int, int]]] = {}
        """Offset and size of each line of the rows that are not dropped, by their index."""
        self.unfinished: dict[int, UnfinishedRow] = {}
        try:
            self._begin(resume=resume)
        except OSError as error:
            raise ConfigError(f"Cannot use {path}: {error.strerror}.") from error

    def append(self, records: Sequence[TokenRecord]) -> None:
        """Adds tokens, which are on disk then."""
        if not self._writes or not records:
            return
        lines = [(record.line, format_record(record)) for record in records]
        try:
            if self._fd is None:
                self._replace(lines)
                return
            _write(self._fd, b"".join(line for _, line in lines))
            os.fsync(self._fd)
            self._note(lines)
            if self._size > 2 * self._live + SLACK_BYTES:
                live = sorted((*place, index) for index, places in self._places.items() for place in places)
                self._replace([(index, os.pread(self._fd, size, offset)) for offset, size, index in live])
        except OSError as error:
            _log.warning("Tokens are not written to %s any more: %s.", self._path, error.strerror)
            self.close()

    def drop(self, index: int) -> None:
        """Forgets a row, which is finished."""
        self.unfinished.pop(index, None)
        self._live -= sum(size for _, size in self._places.pop(index, ()))

    def close(self) -> None:
        """Ends the writing; the file stays."""
        self._writes = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _begin(self, *, resume: bool) -> None:
        if not self._path.exists():
            return
        if not is_token_journal(self._path):
            if self._writes:
                raise ConfigError(
                    f"{self._path}, where tokens would be kept, is a file of something else. "
                    "Move it, or give the output another name."
                )
            return
        if resume:
            self._read()
        if self._writes and self.unfinished:  # without what was torn or damaged, so that what follows can be read
            whole = (
                TokenRecord(index, row.key, request, number, 0, known)
                for index, row in self.unfinished.items()
                for request, outputs in row.requests.items()
                for number, known in outputs.items()
            )
            self._replace([(record.line, format_record(record)) for record in whole])
        elif self._writes:
            remove_token_journal(self._path)

    def _read(self) -> None:
        """Fills `unfinished`, and says what cannot be used."""
        damaged = 0
        with self._path.open("rb") as file:
            if (head := file.readline()) != self._head:
                is_whole = head.startswith(MAGIC)
                what = "of another model or version of cbatch" if is_whole else "damaged at its beginning"
                _log.warning("%s is %s: unfinished answers begin anew.", self._path, what)
                return
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a kill has torn the last one
                try:
                    self._take(parse_record(line))
                except (ValueError, KeyError, TypeError):
                    damaged += 1
        if damaged:
            records = f"{damaged:,} records are" if damaged > 1 else "a record is"
            _log.warning("%s: %s damaged. What is missing is computed again.", self._path, records)

    def _take(self, record: TokenRecord) -> None:
        """Adds tokens to their output. Raises ValueError if tokens before them are missing."""
        row = self.unfinished.setdefault(record.line, UnfinishedRow(record.row_key))
        row.key = record.row_key
        outputs = row.requests.setdefault(record.request, {})
        known, new, start = outputs.get(record.output, KnownOutput()), record.tokens, record.start
        if start > len(known.token_ids):
            raise ValueError("tokens are missing before it")
        outputs[record.output] = KnownOutput(
            [*known.token_ids[:start], *new.token_ids], [*known.logprobs[:start], *new.logprobs]
        )

    def _replace(self, lines: Lines) -> None:
        """Puts a file with these lines in the place of the one that is there, if there is one."""
        new = _new_path(self._path)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _write(fd, self._head + b"".join(line for _, line in lines))
            os.fsync(fd)
            new.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._size, self._live, self._places = fd, len(self._head), 0, {}
        self._note(lines)

    def _note(self, lines: Lines) -> None:
        """Counts lines that were written at the end."""
        for index, line in lines:
            self._places.setdefault(index, []).append((self._size, len(line)))
            self._size += len(line)
            self._live += len(line)


def token_journal_of(output: Path) -> Path:
    """Where the tokens of rows are kept that are to be written to `output`."""
    return output.with_name(output.name + ENDING)


def is_token_journal(path: Path) -> bool:
    """Whether a file is there, and is one of these, perhaps with a damaged beginning."""
    try:
        with path.open("rb") as file:
            if file.readline().startswith(MAGIC):
                return True
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    parse_record(line)
                    return True
    except OSError:
        pass
    return False


def remove_token_journal(path: Path) -> None:
    """Removes a journal, and what a kill may have left of a new one. A file of something else stays."""
    with suppress(OSError):
        _new_path(path).unlink(missing_ok=True)
        if is_token_journal(path):
            path.unlink()


def _new_path(path: Path) -> Path:
    """Where a journal is written before it is put in its place."""
    return path.with_name(f".{path.name}.new")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
