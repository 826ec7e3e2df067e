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
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.base.errors import ConfigError, os_errors_as
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
    tokens, packed = fields["tokens"], fields.pop("logprobs", ())
    logprobs = [
        TokenLogprobs(token, logprob, [(other, value) for other, value in top])
        for token, (logprob, top) in zip(tokens, packed, strict=bool(packed))
    ]
    return TokenRecord(**fields | {"tokens": KnownOutput(tokens, logprobs)})


def _parsed(lines: Iterable[bytes]) -> Iterator[TokenRecord | None]:
    """The records of these lines, None for damaged ones; without a last one that a kill has torn."""
    for line in lines:
        if line.endswith(b"\n"):
            try:
                yield parse_record(line)
            except (ValueError, KeyError, TypeError):
                yield None


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


class TokenJournal:
    """Reads what an earlier run has left, and appends. The lock of the output keeps other runs away from it.

    A journal that cannot be written ends no run: it is left out from then on, with a warning.

    unfinished: what is left of rows of the earlier run, by the index of their line, until they are dropped: all tokens
                of each output, by its request and number
    """

    def __init__(self, path: Path, model: str, *, resume: bool, writes: bool = True) -> None:
        """
        model:  its fingerprint; tokens of another model are not read
        resume: whether an earlier run is continued; else what it has left is removed
        writes: False to read only

        Raises ConfigError if the file is of something else or cannot be used.
        """
        digest = hashlib.blake2b(model.encode(), digest_size=16).hexdigest()
        self._path, self._writes = path, writes
        self._head = MAGIC + f"{VERSION} {digest}\n".encode()
        self._fd: int | None = None
        self._sizes: Counter[int] = Counter()
        """Bytes in the file of each row that is not dropped, by its index."""
        self.unfinished: dict[int, dict[tuple[str, int], TokenRecord]] = {}
        with os_errors_as(ConfigError, f"Cannot use {path}"):
            self._begin(resume=resume)

    def append(self, records: Iterable[TokenRecord]) -> None:
        """Adds tokens, which are on disk then."""
        if not self._writes or not (records := list(records)):
            return
        try:
            if self._fd is None:
                self._replace(records)
                return
            self._write(self._fd, records)
            if os.fstat(self._fd).st_size > 2 * self._sizes.total() + SLACK_BYTES:
                with self._path.open("rb") as file:
                    records = [one for one in _parsed(islice(file, 1, None)) if one and one.line in self._sizes]
                self._replace(records)
        except OSError as error:
            _log.warning("Tokens are not written to %s any more: %s.", self._path, error.strerror)
            self.close()

    def known(self, line: int, request: str) -> dict[int, KnownOutput]:
        """The tokens that the outputs of a request had in the earlier run, by their numbers."""
        return {one.output: one.tokens for one in self.unfinished.get(line, {}).values() if one.request == request}

    def drop(self, index: int) -> None:
        """Forgets a row, which is finished."""
        self.unfinished.pop(index, None)
        self._sizes.pop(index, None)

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
            self._replace(record for row in self.unfinished.values() for record in row.values())
        elif self._writes:
            remove_token_journal(self._path)

    def _read(self) -> None:
        damaged = 0
        with self._path.open("rb") as file:
            if (head := file.readline()) != self._head:
                is_whole = head.startswith(MAGIC)
                what = "of another model or version of cbatch" if is_whole else "damaged at its beginning"
                _log.warning("%s is %s: unfinished answers begin anew.", self._path, what)
                return
            for record in _parsed(file):
                damaged += record is None or not self._take(record)
        if damaged:
            records = f"{damaged:,} records are" if damaged > 1 else "a record is"
            _log.warning("%s: %s damaged. What is missing is computed again.", self._path, records)

    def _take(self, record: TokenRecord) -> bool:
        """Adds tokens to their output, unless tokens before them are missing; returns whether it did."""
        known = self.known(record.line, record.request).get(record.output, KnownOutput())
        new, start = record.tokens, record.start
        if is_next := start <= len(known.token_ids):
            tokens = KnownOutput([*known.token_ids[:start], *new.token_ids], [*known.logprobs[:start], *new.logprobs])
            outputs = self.unfinished.setdefault(record.line, {})
            outputs[record.request, record.output] = record._replace(start=0, tokens=tokens)
        return is_next

    def _replace(self, records: Iterable[TokenRecord]) -> None:
        """Puts a file with these records in the place of the one that is there, if there is one."""
        new = _new_path(self._path)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            self._sizes.clear()
            self._write(fd, records, self._head)
            new.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd

    def _write(self, fd: int, records: Iterable[TokenRecord], head: bytes = b"") -> None:
        """Appends records, which count as live from now on."""
        data = bytearray(head)
        for record in records:
            line = format_record(record)
            self._sizes[record.line] += len(line)
            data += line
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)


def token_journal_of(output: Path) -> Path:
    """Where the tokens of rows are kept that are to be written to `output`."""
    return output.with_name(output.name + ENDING)


def is_token_journal(path: Path) -> bool:
    """Whether a file is there, and is one of these, perhaps with a damaged beginning."""
    try:
        with path.open("rb") as file:
            return file.readline().startswith(MAGIC) or any(record is not None for record in _parsed(file))
    except OSError:
        return False


def remove_token_journal(path: Path) -> None:
    """Removes a journal, and what a kill may have left of a new one. A file of something else stays."""
    with suppress(OSError):
        _new_path(path).unlink(missing_ok=True)
        if is_token_journal(path):
            path.unlink()


def _new_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
